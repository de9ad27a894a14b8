import { afterEach, describe, expect, it, vi } from "vitest";
import { dot, length, principal, rms } from "../src/lib/algebra";
import { color, gradient, limitOf, pixels, table } from "../src/lib/colors";
import { bytes, count, large, number, percent, tex, visible } from "../src/lib/format";
import { readLink, writeLink } from "../src/lib/link";
import { recall, remember } from "../src/lib/memory";
import { at, decode, half } from "../src/lib/numbers";

const headers = (fields: Record<string, string>): Headers => new Headers(fields);

describe("links", () => {
  const view = { stage: "norm", layer: 7, head: 3, pos: 12, text: "a+b & c#d=é 🙂\n", bos: false, fields: {} };

  it("name a view and come back as the same", () => {
    expect(readLink(writeLink(view))).toEqual({ view });
    expect(writeLink(view)).not.toContain(" ");
    const asking = { ...view, fields: { source: "a&b=c", strength: "-1.5" } };
    expect(readLink(writeLink(asking))).toEqual({ view: asking });
    expect(writeLink({ ...view, fields: { source: "" } })).toBe(writeLink(view));
    expect(readLink("#__proto__=x&Two=y&toward=z").view.fields).toEqual({ toward: "z" });
    expect(readLink(writeLink({ ...view, token: 7042 }))).toEqual({ view: { ...view, token: 7042 } });
  });
  it("give the key away once and never write it", () => {
    expect(readLink("#key=a-b_c&text=x")).toEqual({ view: { text: "x", fields: {} }, key: "a-b_c" });
    expect(readLink("#ticket=t_1&text=x")).toEqual({ view: { text: "x", fields: {} }, ticket: "t_1" });
    expect(writeLink({ ...view, ...readLink("#key=secret&ticket=secret").view })).not.toContain("secret");
  });
  it("leave out what is no number", () => {
    expect(readLink("#layer=-1&head=1e9&pos=x&stage=map").view).toEqual({ stage: "map", fields: {} });
  });
});

describe("numbers", () => {
  it("of float32 come to the bit", () => {
    const sent = Float32Array.from([0.1, -2, 1e-30, 3.25]);
    const found = decode(headers({ "x-dtype": "float32", "x-shape": "2,2", "x-axes": "TD", "x-stride": "4" }), sent.buffer);
    expect([...found.values]).toEqual([...sent]);
    expect(found).toMatchObject({ shape: [2, 2], axes: "TD", stride: 4, error: 0 });
    expect([...at(found, 1).values]).toEqual([...sent.subarray(2)]);
  });
  it("of eight bits have a range, an error and a code for what is not finite", () => {
    const sent = Uint8Array.from([0, 127, 254, 255]);
    const told = { "x-dtype": "uint8", "x-shape": "4", "x-axes": "S", "x-stride": "1", "x-min": "-1.0", "x-max": "3.0" };
    const found = decode(headers(told), sent.buffer);
    expect([...found.values]).toEqual([-1, 1, 3, -Infinity]);
    expect(found.error).toBeCloseTo(4 / 508);
  });
  it("of sixteen bits are those of IEEE", () => {
    expect([0x3c00, 0xc000, 0x7bff, 0x0001, 0x8000, 0x7c00, 0xfc00].map(half)).toEqual([1, -2, 65504, 2 ** -24, -0, Infinity, -Infinity]);
    expect(half(0x7e00)).toBeNaN();
  });
  it("that are not as many as was told are refused", () => {
    const told = headers({ "x-dtype": "float32", "x-shape": "3", "x-axes": "D", "x-stride": "1" });
    expect(() => decode(told, new ArrayBuffer(8))).toThrow("2 numbers came, and 3 were told");
    expect(() => decode(headers({}), new ArrayBuffer(0))).toThrow("no header x-dtype");
  });
});

describe("writing", () => {
  it("gives as many digits as asked for", () => {
    expect([0, 1.23456, -0.012345, 123456, 1.5e-7, -2e9, Infinity, -Infinity, NaN].map((one) => number(one))).toEqual([
      "0", "1.235", "−0.01235", "123500", "1.500e−7", "−2.000e+9", "∞", "−∞", "NaN",
    ]);
    expect(tex(-1.5e-7, 2)).toBe("-1.5 \\cdot 10^{-7}");
    expect(tex(27.4912)).toBe("27.49");
  });
  it("has units", () => {
    expect([large(999), large(134515008), bytes(96506496), count(28311552), percent(0.1234)]).toEqual([
      "999", "135 M", "96.5 MB", "28\u202f311\u202f552", "12.3 %",
    ]);
  });
  it("shows blanks", () => {
    expect([visible(" the"), visible("\n\t"), visible("")]).toEqual(["␣the", "⏎⇥", "∅"]);
  });
});

describe("colours", () => {
  it("end where a few stand out, and say so by the largest", () => {
    const usual = Array.from({ length: 100 }, (_, i) => i / 100);
    expect(limitOf([...usual, 600]).largest).toBe(600);
    expect(limitOf([...usual, 600]).limit).toBeLessThan(1);
    expect(limitOf([1, 2, -3, -Infinity])).toEqual({ limit: 3, largest: 3 });
    expect(limitOf([])).toEqual({ limit: 1, largest: 0 });
  });
  it("have a middle for zero", () => {
    expect(color("signed", false, 0.5)).toEqual([247, 247, 247]);
    expect(color("share", true, 2)).toEqual(color("share", true, 1));
    const stops = [0, 0.25, 0.5, 0.75, 1].map((place) => `rgb(${color("signed", true, place).join(", ")})`);
    expect(gradient("signed", true)).toBe(`linear-gradient(90deg, ${stops.join(", ")})`); // the legend's, from left to right
  });
  it("are copied as whole pixels", () => {
    const shades = table("signed", true);
    const image = new Uint8ClampedArray(8);
    pixels(image)[1] = pixels(shades)[200] as number;
    expect([...image]).toEqual([0, 0, 0, 0, ...color("signed", true, 200 / 255), 255]);
  });
});

describe("algebra", () => {
  it("has lengths", () => {
    expect([dot([1, 2], [3, 4]), length([3, 4]), rms([3, 4], 0)]).toEqual([11, 5, Math.sqrt(12.5)]);
  });
  it("finds the plane in which points lie", () => {
    const points = [[0, 0, 5], [4, 0, 5], [0, 1, 5], [4, 1, 5]];
    const found = principal(Float32Array.from(points.flat()), 4, 3);
    expect(found.share).toBeCloseTo(1);
    const apart = (a: number, b: number): number => Math.hypot(...[0, 1].map((i) => (found.points[a]?.[i] ?? 0) - (found.points[b]?.[i] ?? 0)));
    expect(apart(0, 1)).toBeCloseTo(4);
    expect(apart(0, 2)).toBeCloseTo(1);
    expect(apart(0, 3)).toBeCloseTo(Math.sqrt(17));
  });
});

describe("what the browser keeps", () => {
  afterEach(() => vi.unstubAllGlobals());
  it("is nothing where its storage is full or switched off, and nothing else breaks", () => {
    const full = (): never => {
      throw new DOMException("full", "QuotaExceededError");
    };
    vi.stubGlobal("localStorage", { getItem: () => "kept", setItem: full, removeItem: () => undefined });
    expect([remember("a", "b"), remember("a", undefined), recall("a")]).toEqual([false, true, "kept"]);
    vi.stubGlobal("localStorage", new Proxy({}, { get: full }));
    expect([remember("a", "b"), recall("a")]).toEqual([false, null]);
  });
});
