import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { Address } from "../src/lib/address";
import { api, json, Refusal } from "../src/lib/api";
import { batches, follow } from "../src/lib/events";
import { Kept } from "../src/lib/kept";
import { stream } from "../src/chat/events";
import { tab } from "./page";

beforeEach(() => tab());
afterEach(() => vi.unstubAllGlobals());

describe("answers that are kept", () => {
  const answer = (value: string, bytes: number) => () => Promise.resolve({ value, bytes });

  it("are asked for once, as long as they fit", async () => {
    const kept = new Kept(100);
    expect(await kept.once("a", answer("1", 40))).toBe("1");
    expect(await kept.once("b", answer("2", 40))).toBe("2");
    expect(await kept.once("a", answer("other", 40))).toBe("1"); // a is the last used now
    expect(await kept.once("c", answer("3", 40))).toBe("3");
    expect(await kept.once("b", answer("again", 40))).toBe("again");
    expect(await kept.once("c", answer("other", 40))).toBe("3");
    expect(await kept.once("large", answer("4", 101))).toBe("4");
    expect(await kept.once("large", answer("5", 10))).toBe("5");
  });
  it("are not those that failed, nor those that were forgotten while they came", async () => {
    const kept = new Kept(100);
    await expect(kept.once("a", () => Promise.reject(new Error("no")))).rejects.toThrow("no");
    const late = kept.once("a", answer("1", 60));
    kept.clear();
    expect(await late).toBe("1");
    expect(await kept.once("a", answer("2", 60))).toBe("2");
    expect(await kept.once("a", answer("3", 60))).toBe("2");
  });
});

describe("the backend", () => {
  it("answers every request where one was chosen, and the server is not asked", async () => {
    const asked: string[] = [];
    const error = { message: "not here", code: "not_offered", param: null };
    vi.stubGlobal("fetch", () => Promise.reject(new Error("the network was used")));
    vi.stubGlobal("llamariumBackend", (path: string, { method }: RequestInit) => {
      asked.push(`${method} ${path}`);
      return Promise.resolve(path === "/inspect/build" ? Response.json({ error }, { status: 404 }) : Response.json({ status: "ready" }));
    });
    expect(await api.health()).toEqual({ status: "ready" });
    await expect(json("GET", "/inspect/build")).rejects.toMatchObject({ status: 404, code: "not_offered", message: "not here" });
    expect(asked).toEqual(["GET /health", "GET /inspect/build"]);
  });
});

/** A body that comes in these pieces, and then ends, breaks, or goes on for ever. */
function streamed(pieces: readonly string[], then: "end" | "break" | "wait"): { isLeft: () => boolean } {
  let isLeft = false;
  const left = [...pieces];
  const body = new ReadableStream<Uint8Array>({
    pull(control) {
      const next = left.shift();
      if (next !== undefined) control.enqueue(new TextEncoder().encode(next));
      else if (then === "end") control.close();
      else if (then === "break") control.error(new TypeError("network error"));
    },
    cancel() {
      isLeft = true;
    },
  }, { highWaterMark: 0 });
  vi.stubGlobal("fetch", () => Promise.resolve(new Response(body)));
  return { isLeft: () => isLeft };
}

async function all<T>(from: AsyncIterable<T>, into: T[] = []): Promise<T[]> {
  for await (const one of from) into.push(one);
  return into;
}

describe("a stream of events", () => {
  const { signal } = new AbortController();

  it("is cut where its events end, wherever the network cuts it", async () => {
    streamed(['data: {"a"', ':1}\n', "\n: ping\n\nda", "ta: 2\n\n"], "end");
    expect(await all(batches("/x", {}, signal))).toEqual([['{"a":1}'], ["2"]]);
  });
  it("breaks with a refusal, after what has come", async () => {
    streamed(["data: 1\n\n"], "break");
    const found: string[][] = [];
    await expect(all(batches("/x", {}, signal), found)).rejects.toThrow(Refusal);
    expect(found).toEqual([["1"]]);
  });
  it("is left when what it says is an error, so that the server stops", async () => {
    for (const event of ['{"error":{"message":"too much"}}', "<html>"]) {
      const body = streamed([`data: {"choices":[]}\n\ndata: ${event}\n\n`], "wait");
      const found: object[][] = [];
      await expect(all(stream("/x", {}, signal), found)).rejects.toThrow(/too much|no event/);
      expect(found).toEqual([[{ choices: [] }]]);
      await vi.waitFor(() => expect(body.isLeft()).toBe(true));
    }
  });
  it("of the page's own work ends with its end, or is broken", async () => {
    const found: unknown[] = [];
    streamed(['data: {"type":"cells"}\n\ndata: {"type":"end"}\n\n'], "wait");
    await follow("/x", {}, (one) => found.push(one), signal);
    expect(found).toEqual([{ type: "cells" }]);
    streamed(['data: {"type":"cells"}\n\n'], "end");
    await expect(follow("/x", {}, () => undefined, signal)).rejects.toThrow("broke off");
  });
});

describe("the address", () => {
  it("is written seldom, at last as it is, and never fails", async () => {
    vi.useFakeTimers();
    try {
      const written: string[] = [];
      const write = (way: string) => (_: unknown, __: string, link: string) => {
        written.push(`${way} ${link}`);
        location.hash = link;
        if (link === "#no") throw new DOMException("too often", "SecurityError");
      };
      vi.stubGlobal("history", { replaceState: write("same"), pushState: write("new") });
      const address = new Address();
      for (let i = 0; i <= 200; i++) address.show("map", `#${i}`);
      expect(written).toEqual([0, 1, 2, 3, 4, 5, 6, 7].map((i) => `same #${i}`));
      await vi.advanceTimersByTimeAsync(3000);
      expect(written.slice(8)).toEqual(["same #200"]);
      address.show("norm", "#norm"); // the way back leads to the map
      address.show("norm", "#no");
      expect(written.slice(9)).toEqual(["new #norm", "same #no"]);
      address.at("map"); // the browser went back: no further entry is made of where it is
      address.show("map", "#back");
      expect(written.slice(11)).toEqual(["same #back"]);
      for (let i = 0; i < 3000; i++) {
        address.show("norm", `#${i % 2}`);
        await vi.advanceTimersByTimeAsync(10);
      }
      expect(written.length - 12).toBeLessThanOrEqual(100); // of 30 s
    } finally {
      vi.useRealTimers();
    }
  });
});
