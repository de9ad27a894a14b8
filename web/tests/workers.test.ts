import { beforeEach, describe, expect, it } from "vitest";
import { Answers } from "../src/site/answers";
import type { Open, Opening } from "../src/site/messages";
import { Workers } from "../src/site/workers";
import { FakeWorker } from "./fake-worker";

let started: FakeWorker[];
let told: Opening[];
let open: string;
let answers: Answers;
let workers: Workers;

const wanted = (name: string) => ({ name, command: "", file: `${name}.gguf`, kernels: "", sharedKernels: "", lesson: null, threads: undefined });
const worker = (number: number): FakeWorker => started[number] as FakeWorker;
/** Which of the workers answers a question. */
const answering = (): number[] => {
  void answers.ask("/health", {});
  return started.flatMap(({ sent, isEnded }, i) => (!isEnded && sent.at(-1)?.kind === "ask" ? [i] : []));
};

beforeEach(() => {
  started = [];
  told = [];
  answers = new Answers();
  const start = (): FakeWorker => started[started.push(new FakeWorker()) - 1] as FakeWorker;
  workers = new Workers(answers, start, (opening, nowOpen) => {
    told.push(opening);
    open = nowOpen;
  });
});

describe("a first model", () => {
  it("is opened by the worker that the page has asked from its beginning", () => {
    void answers.ask("/inspect/passes", { method: "POST", body: '{"text":"a"}' });
    workers.open(wanted("first"));
    expect(started).toHaveLength(1);
    expect(worker(0).sent).toMatchObject([{ kind: "ask" }, { kind: "open", name: "first", instance: 1 }]);
    worker(0).tell({ state: "open" });
    expect(told).toMatchObject([{ state: "open" }]);
    expect(answering()).toEqual([0]);
  });
  it.each(["cancelled", "broken", "failed"])("that is %s leaves room for another one", async (how) => {
    const asked = answers.ask("/inspect/model", {});
    workers.open(wanted("first"));
    if (how === "cancelled") workers.cancel();
    else if (how === "broken") worker(0).break("out of memory");
    else worker(0).tell({ name: "first", state: "failed", message: "is damaged" });
    expect(told).toMatchObject([{ name: "first", state: "failed", message: expect.stringMatching(/cancelled|out of memory|damaged/) as string }]);
    if (how !== "failed") expect((await asked).status).toBe(422);
    workers.open(wanted("second"));
    expect(worker(0).isEnded).toBe(true);
    expect(answering()).toEqual([1]); // which says how far it is
    worker(1).tell({ state: "open", name: "second" });
    expect([told.at(-1)?.state, open]).toEqual(["open", "second"]);
  });
  it("may be tried again by its worker, and cancelled then", () => {
    workers.open(wanted("first"));
    worker(0).tell({ state: "failed", message: "the server answers 503" });
    worker(0).tell({ state: "loading", name: "first" });
    workers.cancel();
    expect(told.at(-1)).toMatchObject({ name: "first", message: "first: opening was cancelled" });
  });
});

describe("a further model", () => {
  beforeEach(() => {
    workers.open(wanted("first"));
    worker(0).tell({ state: "open", name: "first" });
    void answers.ask("/inspect/passes", { method: "POST", body: '{"text":"a"}' });
    void answers.ask("/inspect/passes", { method: "POST", body: '{"ids":[1]}' });
    workers.open(wanted("second"));
  });

  it("is opened beside the one that answers, with the page's text, and takes its place then", () => {
    expect(worker(1).sent).toMatchObject([{ kind: "open", name: "second", instance: 2, first: { text: "a" } } satisfies Partial<Open>]);
    worker(1).tell({ state: "loading", progress: 0.5 });
    expect(answering()).toEqual([0]);
    worker(1).tell({ state: "open" });
    expect(worker(0).isEnded).toBe(true);
    expect(answering()).toEqual([1]);
  });
  it.each(["loading", "computing"] as const)("is cancelled at once while it is %s, and the one before goes on", (state) => {
    worker(1).tell({ state, name: "second" });
    workers.cancel();
    expect(worker(1).isEnded).toBe(true);
    expect(told.at(-1)).toMatchObject({ name: "second", state: "failed", message: "second: opening was cancelled" });
    expect(open).toBe("first");
    expect(answering()).toEqual([0]);
    workers.cancel(); // nothing is being opened
    expect(worker(0).isEnded).toBe(false);
  });
  it.each(["broken", "failed"])("that is %s leaves the one before", (how) => {
    if (how === "broken") worker(1).break("out of memory");
    else worker(1).tell({ name: "second", state: "failed", message: "is damaged" });
    expect(told.at(-1)).toMatchObject({ name: "second", state: "failed" });
    expect(open).toBe("first");
    expect(worker(1).isEnded).toBe(true);
    expect(answering()).toEqual([0]);
  });
  it("gives way to a third one", () => {
    workers.open(wanted("third"));
    expect(worker(1).isEnded).toBe(true);
    worker(2).tell({ state: "open" });
    expect(answering()).toEqual([2]);
  });
  it("answers on its own where the one before breaks meanwhile", async () => {
    worker(0).break("out of memory");
    expect(open).toBe("");
    expect((await answers.ask("/health", {})).status).toBe(422);
    worker(1).tell({ state: "open" });
    expect(answering()).toEqual([1]);
  });
});
