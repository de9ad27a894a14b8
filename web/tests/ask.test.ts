import { describe, expect, it, vi } from "vitest";

const session: Record<string, unknown> = {};
vi.mock("../src/lib/session.svelte", () => ({ session }));
vi.stubGlobal("sessionStorage", { getItem: () => "", setItem: () => undefined });
const { readEdits, said, writeEdits, asInside, asPython } = await import("../src/lib/edits");
const { literal, named, quoted, request } = await import("../src/lib/python");
const { fileName } = await import("../src/lib/save");
const { follow } = await import("../src/lib/events");
const { Refusal } = await import("../src/lib/api");

describe("edits", () => {
  const all = [
    { part: "head", layer: 3, head: 2, factor: 0, positions: [1, 5] },
    { part: "mlp", layer: 7, head: null, factor: -1.5, positions: null },
    { part: "embed", layer: null, head: null, factor: 2, positions: null },
  ] as const;
  it("stand in a link and come back", () => {
    expect(readEdits(writeEdits(all))).toEqual(all);
    expect(writeEdits(all)).toBe("head:3:2:0:1,5;mlp:7::-1.5:;embed:::2:");
  });
  it("that are named badly are left out", () => {
    expect(readEdits("head:3::0:;mlp::::;embed:1::0:;norm:1::0:;mlp:1:2:0:;mlp:1::1e9:;mlp:1::0:,;<b>;mlp:4::0:")).toEqual([
      { part: "mlp", layer: 4, head: null, factor: 0, positions: null },
    ]);
  });
  it("are said in words and in Python", () => {
    expect(all.map(said)).toEqual([
      "head 2 of layer 3 taken away at tokens 1, 5", "the MLP of layer 7 times −1.5 at all tokens", "the embedding times 2 at all tokens",
    ]);
    expect(all.map(asPython)).toEqual([
      'scale("head", 0, layer=3, head=2, positions=[1, 5])', 'scale("mlp", -1.5, layer=7)', 'scale("embed", 2)',
    ]);
  });
});

describe("a request", () => {
  it("has the text up to the token, and heads and MLPs that are taken away everywhere", () => {
    vi.stubGlobal("location", { origin: "http://page" });
    Object.assign(session, { pass: { tokens: [{ id: 5 }, { id: 6 }, { id: 7 }] }, pos: 1, adapter: "it's" });
    const inside = asInside(readEdits("head:3:2:0:;mlp:7::0:"));
    const [, sent] = /-d '([^']*)'\n$/.exec(request(inside ?? {})) ?? [];
    expect(JSON.parse(sent ?? "")).toEqual({
      model: "it's", prompt: [5, 6], max_tokens: 12, temperature: 0, ablate: { heads: ["3.2"], mlps: [7] },
    });
    for (const other of ["", "head:3:2:0.5:", "mlp:7::0:1", "attention:1::0:", "mlp:7::0:;embed:::0:"]) expect(asInside(readEdits(other))).toBeUndefined();
  });
});

describe("Python's literals", () => {
  it("quote what ends a string, and what is not seen", () => {
    expect(quoted(`a"b\\c'\n\t`)).toBe(String.raw`"a\"b\\c'\n\t"`);
    expect(quoted("\u202e\u200b\u2028\u00a0\u{e0001}\u007fé🙂 ")).toBe(String.raw`"\u202e\u200b\u2028\u00a0\U000e0001\u007f${"é🙂 "}"`);
  });
  it("are None, True and numbers", () => {
    expect(literal([null, undefined, true, false, 1.5, -2, Infinity, NaN, "x", { a: [1] }])).toBe(
      '[None, None, True, False, 1.5, -2, float("inf"), float("nan"), "x", {"a": [1]}]',
    );
    expect(named({ k: 3, layer: undefined, head: null, part: "mlp" })).toBe('k=3, part="mlp"');
  });
});

it("a file's name is letters and digits", () => {
  expect(fileName("Évidence: <b>../../x</b> ␣cat", "png")).toBe("llamarium-e-vidence-b-x-b-cat.png");
  expect(fileName("␣", "json")).toBe("llamarium-view.json");
});

describe("a stream of events", () => {
  function answering(parts: string[]): void {
    const bytes = new TextEncoder().encode(parts.join("|"));
    const cut = parts.length > 1 ? parts.map((part) => new TextEncoder().encode(part)) : [...bytes].map((byte) => Uint8Array.of(byte));
    vi.stubGlobal("fetch", () =>
      Promise.resolve(new Response(new ReadableStream({ start: (to) => { cut.forEach((part) => to.enqueue(part)); to.close(); } }))),
    );
  }
  const taken = async (): Promise<unknown[]> => {
    const found: unknown[] = [];
    await follow("/x", {}, (one) => found.push(one), new AbortController().signal);
    return found;
  };
  it("is taken however it is cut, and pings are not", async () => {
    answering(['event: a\ndata: {"type":"a","text":"é"}\n\n: ping\n\ndata: {"type":"b"}\n\ndata: {"type":"end"}\n\n']);
    expect(await taken()).toEqual([{ type: "a", text: "é" }, { type: "b" }]);
  });
  it("that breaks off is no end", async () => {
    answering(['data: {"type":"a"}\n\n', 'data: {"type":"en']);
    await expect(taken()).rejects.toMatchObject({ status: 0, code: "broken" });
  });
  it("ends with what went wrong", async () => {
    answering(['data: {"type":"error","error":{"message":"no","code":"c","param":null}}\n\n']);
    await expect(taken()).rejects.toEqual(new Refusal(500, "no", "c", null));
  });
});
