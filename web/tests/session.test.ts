import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { session as Page } from "../src/lib/session.svelte";
import { served, tab, type Said } from "./page";

const MODEL = { name: "tiny", shape: { L: 2, N: 4, V: 100 }, adapters: [], loaded_with: {} };

interface Request {
  text?: string;
  ids?: number[];
}

/** Every letter is a token. */
function passOf({ text = "", ids }: Request, runner = "cpu"): object {
  const found = ids ?? [...text].map((_, i) => i);
  return { id: `p${found.length}`, tokens: found.map((id) => ({ id, text: text[id] ?? "?" })), adapter: null, experiment: null, runner, dtype: "float32" };
}

function answering(_method: string, path: string, body: unknown): Said {
  if (path === "/inspect/model") return { body: MODEL };
  if (path === "/inspect/passes") return { body: passOf(body as Request) };
  return { status: 404, body: { error: { message: "none", code: null, param: null } } };
}

let session: typeof Page;

beforeEach(async () => {
  vi.resetModules();
  tab("#stage=map&pos=3&text=abcdef");
  served(answering);
  ({ session } = await import("../src/lib/session.svelte"));
});

afterEach(() => {
  session.stop();
  vi.unstubAllGlobals();
});

describe("a page", () => {
  it("shows a text, its link and its tokens together, also while another is asked for and where that is refused", async () => {
    await session.start();
    expect([session.text, session.pass?.tokens.length, session.pos]).toEqual(["abcdef", 6, 3]);
    const { link } = session;
    served((...asked) => (asked[1] === "/inspect/passes" ? { status: 400, body: { error: { message: "too long", code: null, param: "text" } } } : answering(...asked)));
    const tried = session.attempt("xy");
    expect([session.draft, session.busy, session.text, session.pos]).toEqual(["xy", true, "abcdef", 3]);
    await tried;
    expect(session.trouble).toMatchObject({ kind: "refused", message: "too long" });
    expect([session.draft, session.text, session.pass?.tokens.length, session.link]).toEqual(["xy", "abcdef", 6, link]);
    const { program } = await import("../src/lib/python");
    expect(program([])).toContain('llama.encode("abcdef")  # 6 tokens');
  });
  it("begins with a text of characters where the model's tokens are such, and with the reader's where there is one", async () => {
    session.stop();
    vi.resetModules();
    tab("#stage=first");
    ({ session } = await import("../src/lib/session.svelte"));
    expect(session.draft).toBe("My grandmother baked a delicious apple");
    await session.start();
    expect([session.draft, session.text, session.pass?.tokens.length]).toEqual(["To be, or n", "To be, or n", 11]);
    served((...asked) => (asked[1] === "/inspect/model" ? { body: { ...MODEL, shape: { ...MODEL.shape, V: 49_152 } } } : answering(...asked)));
    session.stop();
    vi.resetModules();
    ({ session } = await import("../src/lib/session.svelte"));
    await session.start();
    expect(session.text).toBe("My grandmother baked a delicious apple");
  });
  it("moves to the token that goes with a text when that is there", async () => {
    await session.start();
    session.token = 7;
    await session.attempt("hello", { fields: { other: "x" } });
    expect([session.draft, session.text, session.pos, session.token, session.fields]).toEqual(["hello", "hello", 4, undefined, { other: "x" }]);
    await session.attempt("hello", { pos: (pass) => pass.tokens.length - 2 });
    expect(session.pos).toBe(3);
  });
  it("does not give another view what was asked with a text in the one before", async () => {
    await session.start();
    const tried = session.attempt("hello", { fields: { other: "x" } });
    session.open("norm");
    await tried;
    expect([session.text, session.fields]).toEqual(["hello", {}]);
  });
  it("grows by tokens that stand in the link with how they came, and gives them back", async () => {
    await session.start();
    session.open("norm", { other: "x" });
    await session.append([{ id: 7, text: "g" }], "d");
    await session.append([{ id: 8, text: "h" }, { id: 9, text: "i" }], "f");
    const { link } = session;
    expect([session.draft, session.text, session.ids?.join(), session.answer, session.answerAt, session.pos]).toEqual(["abcdefghi", "abcdefghi", "0,1,2,3,4,5,7,8,9", "dff", 6, 8]);
    expect(session.fields).toEqual({ other: "x" });
    await session.cut(1);
    expect([session.draft, session.ids?.join(), session.answer]).toEqual(["abcdefg", "0,1,2,3,4,5,7", "d"]);
    session.follow(link.slice(link.indexOf("#")));
    await vi.waitFor(() => expect([session.pass?.tokens.length, session.answer]).toEqual([9, "dff"]));
    await session.attempt("xy"); // another text has no answer yet
    expect([session.ids, session.answer]).toEqual([undefined, ""]);
  });
  it("takes all that a link names, and what it does not name as it is at first", async () => {
    await session.start();
    await session.want({ bos: false });
    session.follow("#stage=norm&text=abc");
    expect([session.bos, session.pass, session.draft]).toEqual([true, undefined, "abc"]);
    await vi.waitFor(() => expect(session.pass?.tokens.length).toBe(3));
    expect(session.pos).toBe(2); // the last that there is
  });
  it("goes on with what is shown where a link names the same", async () => {
    await session.start();
    const asked = served(answering);
    session.follow("#stage=norm&pos=99&text=abcdef");
    expect([session.stage, session.pos, session.pass?.tokens.length, asked]).toEqual(["norm", 5, 6, []]);
  });
  it("shows nothing of the model before once it has opened another one itself, however soon after the last", async () => {
    let [instance, L] = [1, 2];
    served((...asked) => ({ ...answering(...asked), ...(asked[1] === "/inspect/model" && { body: { ...MODEL, shape: { ...MODEL.shape, L } } }), headers: { "x-llamarium-instance": String(instance) } }));
    await session.start();
    await session.append([{ id: 7, text: "g" }], "f");
    session.draft = "typed";
    for (const layers of [3, 4]) {
      [instance, L] = [instance + 1, layers];
      const switched = session.switchModel();
      expect([session.pass, session.model]).toEqual([undefined, undefined]);
      await switched;
      expect([session.trouble, session.model?.shape.L, session.text, session.ids, session.pos, session.draft]).toEqual([undefined, layers, "abcdefg", undefined, 6, "typed"]);
    }
  });
  it("begins with a text for the model that opens where the first one did not", async () => {
    session.stop();
    vi.resetModules();
    tab("#stage=first");
    ({ session } = await import("../src/lib/session.svelte"));
    served(() => ({ status: 503, body: { error: { message: "cancelled", code: "cancelled", param: null } } }));
    await session.start();
    expect(session.model).toBeUndefined();
    served(answering);
    await session.switchModel();
    expect(session.text).toBe("To be, or n");
  });
  it("asks anew when it is told to run, though nothing has changed", async () => {
    await session.start();
    const before = session.pass;
    const asked = served(answering);
    await session.submit();
    expect(asked).toContain("POST /inspect/passes");
    expect(session.pass).not.toBe(before);
  });
});

describe("a page whose server changes", () => {
  const named = (name: string, runner: string) => (...asked: Parameters<typeof answering>): Said => {
    const headers = { "x-llamarium-instance": name };
    if (asked[1] === "/inspect/model") return { headers, body: { ...MODEL, name: `model of ${name}` } };
    return { ...answering(...asked), headers, ...(asked[1] === "/inspect/passes" ? { body: passOf(asked[2] as Request, runner) } : {}) };
  };

  it("forgets all that the one before has said", async () => {
    served(named("one", "cpu"));
    await session.start();
    expect(session.model?.name).toBe("model of one");
    served(named("two", "cuda"));
    await session.submit();
    await vi.waitFor(() => expect(session.pass?.runner).toBe("cuda"));
    expect(session.model?.name).toBe("model of two");
  });
  it("does not ask for ever where two answer in turns", async () => {
    let times = 0;
    served(named("one", "cpu"));
    await session.start();
    served((...asked) => named(times++ % 2 ? "one" : "two", "cpu")(...asked));
    await session.submit();
    await vi.waitFor(() => expect(session.trouble).toMatchObject({ kind: "gone" }));
    await new Promise((done) => setTimeout(done, 20));
    expect(times).toBeLessThan(10);
  });
  it("asks for the key wherever it is refused", async () => {
    await session.start();
    const { api } = await import("../src/lib/api");
    served(() => ({ status: 401, body: { error: { message: "no", code: "invalid_api_key", param: null } } }));
    await expect(api.get("source", { name: "x" })).rejects.toThrow("no");
    await vi.waitFor(() => expect(session.trouble).toEqual({ kind: "key", isWrong: false }));
    const { key } = await import("../src/lib/api");
    key.set("another");
    await expect(api.get("source", { name: "y" })).rejects.toThrow("no");
    await vi.waitFor(() => expect(session.trouble).toEqual({ kind: "key", isWrong: true }));
    key.set("");
  });
  it("waits in one loop while it loads, however often it is asked", async () => {
    vi.useFakeTimers();
    try {
      const loading = { status: 503, body: { error: { message: "loading", code: "loading", param: null } } };
      const asked = served((_, path) => (path === "/health" ? { body: { status: "loading", progress: 0.5 } } : loading));
      await session.start();
      await session.run();
      await session.run();
      await vi.advanceTimersByTimeAsync(2000);
      expect(session.trouble).toEqual({ kind: "loading", progress: 0.5 });
      expect(asked.filter((one) => one === "GET /health").length).toBeLessThanOrEqual(7);
      served((...one) => (one[1] === "/health" ? { body: { status: "ok" } } : answering(...one)));
      await vi.advanceTimersByTimeAsync(500);
      expect([session.trouble, session.pass?.tokens.length]).toEqual([undefined, 6]);
    } finally {
      vi.useRealTimers();
    }
  });
  it("says so where what comes is no answer", async () => {
    served(() => ({ body: "<!doctype html>" }));
    await session.start();
    expect(session.trouble).toMatchObject({ kind: "gone", message: expect.stringContaining("broke off") as string });
  });
  it("says so where a proxy answers for a server that loads", async () => {
    served((_, path) => (path === "/health" ? { body: "<html>" } : { status: 503, body: { error: { message: "l", code: "loading", param: null } } }));
    await session.start();
    await vi.waitFor(() => expect(session.trouble).toMatchObject({ kind: "gone" }));
  });
});

describe("a page that is left", () => {
  afterEach(() => vi.useRealTimers());

  it.each([
    ["refuses the key", 401, "tabs"],
    ["is gone", 0, "gone"],
  ])("waits for nothing more where the server %s", async (_, status, kind) => {
    await session.start();
    served(() => {
      if (status === 0) throw new TypeError("no answer");
      return { status, body: { error: { message: "no", code: "invalid_api_key", param: null } } };
    });
    vi.useFakeTimers();
    await session.submit();
    expect(session.trouble).toMatchObject({ kind });
    expect(vi.getTimerCount()).toBe(1);
    session.stop();
    expect(vi.getTimerCount()).toBe(0);
  });
});

describe("several tabs of one address", () => {
  const other: { heard: unknown[]; channel?: BroadcastChannel } = { heard: [] };
  const refusing = (right: string) => async (...asked: Parameters<typeof answering>): Promise<Said> => {
    const { key } = await import("../src/lib/api");
    return key.get() === right ? answering(...asked) : { status: 401, body: { error: { message: "no", code: "invalid_api_key", param: null } } };
  };

  beforeEach(() => {
    other.heard = [];
    other.channel = new BroadcastChannel("llamarium-key");
    other.channel.onmessage = ({ data }) => other.heard.push(data);
  });
  afterEach(() => other.channel?.close());

  it("share the key: one without asks, and takes what another tells", async () => {
    served(refusing("right"));
    await session.start();
    await vi.waitFor(() => expect(other.heard).toContainEqual({ kind: "ask" }));
    expect(session.trouble).toEqual({ kind: "tabs" });
    other.channel?.postMessage({ kind: "key", key: "right" });
    await vi.waitFor(() => expect(session.pass?.tokens.length).toBe(6));
    await vi.waitFor(() => expect(other.heard).toContainEqual({ kind: "key", key: "right" })); // others may wait, too
  });
  it("try a key that was refused only once, and none that is no key", async () => {
    const asked = served(refusing("right"));
    await session.start();
    other.channel?.postMessage({ kind: "key", key: "wrong" });
    await vi.waitFor(() => expect(session.trouble).toEqual({ kind: "key", isWrong: true }));
    const { length } = asked;
    for (const key of ["wrong", "", "a b", "x".repeat(600), 7]) other.channel?.postMessage({ kind: "key", key });
    other.channel?.postMessage(null);
    await new Promise((done) => setTimeout(done, 50));
    expect(asked.length).toBe(length);
  });
  it("tell a key only where the server takes it, and keep their own", async () => {
    tab("#stage=map&text=abcdef&key=right");
    served(refusing("right"));
    await session.start();
    other.channel?.postMessage({ kind: "ask" });
    await vi.waitFor(() => expect(other.heard).toContainEqual({ kind: "key", key: "right" }));
    other.channel?.postMessage({ kind: "key", key: "another" });
    await new Promise((done) => setTimeout(done, 50));
    const { key } = await import("../src/lib/api");
    expect(key.get()).toBe("right");
    served(refusing("new"));
    await session.submit();
    other.heard = [];
    other.channel?.postMessage({ kind: "ask" });
    await new Promise((done) => setTimeout(done, 50));
    expect(other.heard).not.toContainEqual({ kind: "key", key: "right" });
  });
  it("go on by themselves when the server is back", async () => {
    vi.useFakeTimers();
    vi.stubGlobal("document", { hidden: false });
    try {
      vi.stubGlobal("fetch", () => Promise.reject(new TypeError("refused")));
      await session.start();
      expect(session.trouble).toMatchObject({ kind: "gone" });
      await vi.advanceTimersByTimeAsync(2100);
      expect(session.trouble).toMatchObject({ kind: "gone" });
      served((...one) => (one[1] === "/health" ? { body: { status: "ok" } } : answering(...one)));
      await vi.advanceTimersByTimeAsync(2100);
      expect([session.trouble, session.pass?.tokens.length]).toEqual([undefined, 6]);
    } finally {
      vi.useRealTimers();
    }
  });
});

describe("a room without texts", () => {
  it("asks for no pass", async () => {
    tab("#stage=chat&text=abc");
    const asked = served(answering);
    await session.start();
    expect([asked, session.trouble, session.model?.name]).toEqual([["GET /inspect/model"], undefined, "tiny"]);
  });
});

describe("selectors", () => {
  it("are asked about where they rest", async () => {
    vi.useFakeTimers();
    try {
      const { pending } = await import("../src/lib/resource.svelte");
      session.go({ layer: 1 });
      expect([session.layer, pending.count]).toEqual([1, 0]);
      for (let layer = 2; layer < 9; layer++) session.go({ layer, pos: 1 });
      expect([session.layer, session.going.layer, pending.count]).toEqual([1, 8, 1]);
      await vi.advanceTimersByTimeAsync(200);
      expect([session.layer, session.pos, pending.count]).toEqual([8, 1, 0]);
      session.go({ pos: 7 });
      session.go({ pos: 8 });
      served(async (...asked) => {
        await new Promise((done) => setTimeout(done, 300));
        return answering(...asked);
      });
      session.follow("#text=another&pos=2"); // where they were going is nowhere in it
      await vi.advanceTimersByTimeAsync(1000);
      expect([session.text, session.pos, session.going.pos, pending.count]).toEqual(["another", 2, 2, 0]);
    } finally {
      vi.useRealTimers();
    }
  });
});
