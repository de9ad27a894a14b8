import { describe, expect, it } from "vitest";
import { joined, piecesOf } from "../src/scene/data/pieces";
import { readFar } from "../src/scene/data/far";
import { csv } from "../src/lib/slide";

describe("numbers as CSV", () => {
  it("have a line each, with their name and places; a text that a spreadsheet would compute does not begin so", async () => {
    const found = await csv({ pattern: [new Float32Array([0.5, -2]), new Float32Array([NaN])], words: [{ text: '=1+"a,b"', id: 3 }], none: null, text: "a\nb" }).text();
    expect(found.split("\r\n")).toEqual([
      "name,index_1,index_2,value", "pattern,0,0,0.5", "pattern,0,1,-2", "pattern,1,0,", 'words.text,0,,"\'=1+""a,b"""', "words.id,0,,3", "none,,,", 'text,,,"a\nb"', "",
    ]);
  });
});

describe("a long text's picture", () => {
  const shape = { N: 2 };
  const window = { start: 3, stop: 100, block: 4, isMean: true };
  /** What the server says of a window: each number tells its layer and column. */
  const numbers = (first: number, columns: number, layers: number): Float32Array => {
    const rows = (count: number, kind: number): number[] => Array.from({ length: count * columns }, (_, i) => 1000 * kind + 100 * Math.floor(i / columns) + first + (i % columns));
    const pairs = Array.from({ length: layers }, (_, l) => Array.from({ length: columns }, (__, c) => Array.from({ length: first + c + 1 }, (___, k) => l + (first + c) / 100 + k / 1e4)));
    return new Float32Array([...rows(layers + 1, 1), ...rows(layers, 2), ...rows(layers, 3), ...rows(layers, 4), ...rows(layers, 5), ...pairs.flat(2)]);
  };

  it("is in pieces what it is as a whole", () => {
    const whole = readFar(numbers(0, 25, 3), window, 3);
    const at = [[0, 10], [10, 11], [11, 25]] as const;
    const parts = at.map(([from, to]) => readFar(numbers(from, to - from, 3), { ...window, start: 3 + 4 * from, stop: 3 + 4 * (to - 1) + 1 }, 3));
    expect(joined(parts)).toEqual(whole);
  });
  it("comes first of few tokens, then in pieces that hold less the longer it is, to its end", () => {
    const pieces = [...piecesOf({ start: 15, stop: 2000, block: 32, isMean: true }, 30, { N: 9 })];
    expect(pieces[0]).toEqual({ start: 15, stop: 16, block: 32, isMean: true });
    expect(pieces.at(-1)?.stop).toBe(2000);
    for (const [i, one] of pieces.entries()) {
      if (i) expect(one.start - (pieces[i - 1]?.stop ?? 0)).toBe(31); // the next column is named by its last token
      expect(4 * 30 * 9 * one.stop * (one.stop - one.start + 31)).toBeLessThan(128 * 2 ** 20);
    }
    const { start, block } = window;
    expect([...piecesOf({ ...window, stop: start + 7 * block + 1 }, 3, shape)].length).toBe(1); // eight columns of four tokens
    expect([...piecesOf({ ...window, stop: start + 8 * block + 1 }, 3, shape)].length).toBe(2);
  });
});
