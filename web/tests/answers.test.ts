import { beforeEach, describe, expect, it } from "vitest";
import { Answers } from "../src/site/answers";
import { FakeWorker } from "./fake-worker";

let worker: FakeWorker;
let answers: Answers;

beforeEach(() => {
  worker = new FakeWorker();
  answers = new Answers();
  answers.use(worker);
});

describe("answers of a worker", () => {
  it("reach whoever asked, in any order", async () => {
    const first = answers.ask("/inspect/model", {});
    const second = answers.ask("/inspect/tokens", { method: "POST", body: '{"text":"a"}' });
    expect(worker.sent).toEqual([
      { kind: "ask", id: 0, method: "GET", path: "/inspect/model", body: undefined }, { kind: "ask", id: 1, method: "POST", path: "/inspect/tokens", body: { text: "a" } },
    ]);
    worker.say({ id: 1, body: '{"second":1}' });
    worker.say({ id: 0, status: 503, body: '{"first":1}' });
    expect(await (await second).json()).toEqual({ second: 1 });
    const answer = await first;
    expect([answer.status, answer.headers.get("x-llamarium-instance"), await answer.json()]).toEqual([503, "1", { first: 1 }]);
  });
  it("carry numbers as they are", async () => {
    const asked = answers.ask("/inspect/weights", {});
    worker.say({ id: 0, headers: { "x-shape": "2" }, body: Float32Array.of(1.5, -2).buffer });
    const answer = await asked;
    expect(answer.headers.get("x-shape")).toBe("2");
    expect([...new Float32Array(await answer.arrayBuffer())]).toEqual([1.5, -2]);
  });
  it("are not waited for once they are not wanted", async () => {
    const control = new AbortController();
    const asked = answers.ask("/inspect/model", { signal: control.signal });
    control.abort(new Error("left"));
    await expect(asked).rejects.toThrow("left");
    expect(worker.sent.at(-1)).toEqual({ kind: "leave", id: 0 });
    worker.say({ id: 0 });
  });
  it("come in parts, until they end or are left", async () => {
    const asked = answers.ask("/inspect/passes/1/patches", { method: "POST" });
    worker.say({ id: 0, body: "data: 1\n\n", goesOn: true });
    const answer = await asked;
    worker.say({ id: 0, body: "data: 2\n\n" });
    expect(await answer.text()).toBe("data: 1\n\ndata: 2\n\n");
    const control = new AbortController();
    const left = answers.ask("/inspect/passes/1/patches", { method: "POST", signal: control.signal });
    worker.say({ id: 1, body: "data: 1\n\n", goesOn: true });
    const reader = (await left).body?.getReader();
    control.abort(new Error("left"));
    await expect((async () => { for (;;) if ((await reader?.read())?.done) return; })()).rejects.toThrow("left");
    expect(worker.sent.at(-1)).toEqual({ kind: "leave", id: 1 });
  });
  it("say why there are none, until there is another worker", async () => {
    const asked = answers.ask("/inspect/model", {});
    answers.fail("the engine has stopped");
    for (const one of [await asked, await answers.ask("/health", {})]) {
      expect(one.status).toBe(422);
      expect(await one.json()).toEqual({ error: { code: "engine_stopped", message: "the engine has stopped", param: null } });
    }
    answers.use((worker = new FakeWorker()));
    const again = answers.ask("/inspect/model", {});
    worker.say({ id: 1 });
    expect((await again).status).toBe(200);
  });
  it("are another worker's after it takes the place of one, and those that are half there break off", async () => {
    const [whole, parts] = [answers.ask("/inspect/model", {}), answers.ask("/inspect/passes/1/patches", { method: "POST" })];
    worker.say({ id: 1, body: "data: 1\n\n", goesOn: true });
    const body = (await parts).text();
    const other = new FakeWorker();
    answers.use(other);
    await expect(body).rejects.toThrow("another model");
    expect(other.sent).toEqual([{ kind: "ask", id: 0, method: "GET", path: "/inspect/model", body: undefined }]);
    worker.say({ id: 0, body: '{"of":"the one before"}' });
    other.say({ id: 0, body: '{"of":"the other"}' });
    const answer = await whole;
    expect([answer.headers.get("x-llamarium-instance"), await answer.json()]).toEqual(["2", { of: "the other" }]);
  });
});
