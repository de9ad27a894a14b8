/** The first screen and the story: bars at a temperature, the words of the cards, and what of a pass they show. */

import { describe, expect, it } from "vitest";
import { atTemperature, isControl, named, unitOf } from "../src/home/bars";
import { clipped, groupsOf, largest, settledAt, tellingLook } from "../src/lib/telling";
import { textAfter, textsFor } from "../src/lib/texts";
import { axesOf } from "../src/story/geometry";
import * as words from "../src/story/words";

describe("the bars", () => {
  const logits = Float32Array.of(1, 3, 2, -1);
  const best = [{ token_id: 1 }, { token_id: 2 }];
  const softmax = (temperature: number): number[] => {
    const weights = Array.from(logits, (one) => Math.exp(one / temperature));
    return weights.map((one) => one / weights.reduce((sum, other) => sum + other, 0));
  };

  it.each([0.1, 0.5, 1, 2])("are the softmax of all logits at temperature %d", (temperature) => {
    const all = softmax(temperature);
    const bars = atTemperature(best, logits, temperature);
    expect(bars[0]).toBeCloseTo(all[1] as number, 10);
    expect(bars[1]).toBeCloseTo(all[2] as number, 10);
  });

  it("are finite for logits whose exponentials are not", () => {
    expect(atTemperature([{ token_id: 0 }], Float32Array.of(900, 100), 0.1)).toEqual([1]);
  });

  it("name tokens so that spaces are seen, and control tokens as the end", () => {
    expect([" pie", "\n", " ", "<|im_end|>", "</s>"].map(named)).toEqual(["␣pie", "⏎", "space", "end of text", "end of text"]);
    expect([isControl("<div>"), isControl(" <|x|>")]).toEqual([false, false]);
  });

  it("offer one text after the other", () => {
    const texts = textsFor(49_152);
    expect(textAfter("something else", texts)).toBe(texts[0]);
    expect(textAfter(texts.at(-1) as string, texts)).toBe(texts[0]);
    expect(textAfter(texts[0], texts)).toBe(texts[1]);
    expect(textsFor(65).every((text) => text.length >= 3 && text.length <= 14)).toBe(true); // what the story can draw
  });

  it("speak of characters where the model's tokens are such", () => {
    const token = (text: string, isSpecial = false) => ({ text, is_special: isSpecial });
    expect(unitOf(65, [token("<bos>", true), token("a"), token("é")])).toBe("character");
    expect(unitOf(65, [token("ab")])).toBe("token");
    expect(unitOf(49152, [token("a")])).toBe("token");
  });
});

describe("what is told of a pass", () => {
  const [layers, heads, tokens, query] = [2, 2, 5, 4];
  const patterns = (set: Record<string, number>): Float32Array => {
    const found = new Float32Array(layers * heads * tokens);
    for (const [at, share] of Object.entries(set)) {
      const [layer, head, key] = at.split(".").map(Number) as [number, number, number];
      found[(layer * heads + head) * tokens + key] = share;
    }
    return found;
  };
  const TEXTS_ = ["The", " grandmother", " a", " cat", " ran"];
  const look = (set: Record<string, number>) => tellingLook(patterns(set), { layers, heads, query, texts: TEXTS_ });

  it("is the head that looks back most, past the first token and the neighbour", () => {
    expect(look({ "0.0.0": 0.99, "0.1.3": 0.9, "1.0.1": 0.5 })).toMatchObject({ layer: 1, head: 0, key: 1, share: 0.5 });
  });

  it("prefers a word to a short piece", () => {
    expect(look({ "0.1.2": 0.9, "1.1.1": 0.4 })).toMatchObject({ layer: 1, head: 1, key: 1 });
  });

  it("is a nearer one where none looks further with a good share", () => {
    expect(look({ "0.1.3": 0.9, "1.0.1": 0.1 })).toMatchObject({ layer: 0, head: 1, key: 3 });
    expect(look({})).toMatchObject({ key: 0 });
  });

  it("has the layers in three groups that join", () => {
    expect(groupsOf(30)).toEqual([[0, 9], [10, 19], [20, 29]]);
    expect(groupsOf(2)).toEqual([[0, 0], [1, 1]]);
    for (const count of [1, 4, 5, 16, 80]) {
      const groups = groupsOf(count);
      expect(groups[0]?.[0]).toBe(0);
      expect(groups.at(-1)?.[1]).toBe(count - 1);
      groups.slice(1).forEach(([first], i) => expect(first).toBe((groups[i]?.[1] ?? 0) + 1));
    }
  });

  it("finds the layer after which the guess stays", () => {
    expect(settledAt([7, 3, 7, 7])).toBe(2);
    expect(settledAt([7, 7])).toBe(0);
    expect(settledAt([1, 2])).toBe(1);
  });

  it("cuts long names so that they say so", () => {
    expect([clipped("abc", 3), clipped("abcd", 3)]).toEqual(["abc", "ab…"]);
    expect(largest([1, 5, 2])).toBe(1);
  });
});

describe("the axes of a card", () => {
  const [wide, narrow] = [axesOf(6, 640, 300, { before: 40 }), axesOf(6, 330, 300, { before: 40 })];

  it("have tokens to the right and layers upwards, and on a phone tokens downwards and layers to the right", () => {
    const way = ({ at }: typeof wide) => [at(1, 0), at(0, 10)].map(([x, y]) => [Math.sign(x - at(0, 0)[0]), Math.sign(y - at(0, 0)[1])]);
    expect(way(wide)).toEqual([[1, 0], [0, -1]]);
    expect(way(narrow)).toEqual([[0, 1], [1, 0]]);
  });

  it.each([wide, narrow])("keep names and drawing within the picture, and apart", ({ width, height, reach, box, frame }) => {
    for (let i = 0; i < 6; i++) {
      const [drawn, name] = [box(i, [0, reach], [-5, 5]), frame(i)];
      for (const one of [drawn, name]) {
        expect(Math.min(one.x, one.y, width - one.x - one.width, height - one.y - one.height)).toBeGreaterThanOrEqual(-1e-9);
      }
      expect(name.x + name.width <= drawn.x || name.y >= drawn.y + drawn.height).toBe(true);
    }
  });
});

describe("the words of the cards", () => {
  const LONG = " grandmothers";
  const every = (unit: words.Unit): string[] => [
    words.pieces({ unit, tokens: 12, vocabulary: 128_256 }),
    words.rows({ unit, width: 4096, token: LONG, nearest: " grandmother" }),
    words.stream({ unit, layers: 32, lengths: [0.812, 649.6] }),
    words.looking({ unit, asking: LONG, layer: 31, head: 31 }),
    words.position({ distance: 12, score: -12.34, beside: 5.64 }),
    words.scores({ unit, asking: LONG, best: { text: " delicious", score: 5.571 } }),
    words.scores({ unit, asking: LONG, best: undefined }),
    words.shares({ unit, asking: LONG, best: { text: " delicious", share: 0.752 } }),
    words.values({ unit, asking: LONG, layer: 31, heads: 32, share: { text: " delicious", share: 0.5 } }),
    words.mlp({ unit, token: LONG, layer: 31, neurons: 14_336, best: 14_000, active: 1_203 }),
    words.layers({ layers: 32, final: LONG, from: 20 }),
    words.layers({ layers: 32, final: LONG, from: 31 }),
    words.guess({ unit, vocabulary: 128_256, best: { text: LONG, probability: 0.9234 } }),
    words.again({ unit, tokens: 12, bytesPerToken: 23_040 }),
  ];

  it.each(["token", "character"] as const)("are at most 35, and speak of a %s", (unit) => {
    for (const said of every(unit)) {
      expect(words.numWords(said), said).toBeLessThanOrEqual(words.MOST_WORDS);
      expect(said).not.toMatch(/NaN|undefined|∞/);
      if (unit === "character") expect(said).not.toMatch(/\btokens?\b/);
    }
  });

  it("leave out what has not come", () => {
    expect(words.rows({ unit: "token", width: 8, token: "a", nearest: undefined })).toBe("A token's number picks a *row* of a table: 8 numbers, learned in training.");
    expect(words.position({ distance: 1, score: 2, beside: undefined })).toContain("score of *2.00*.");
    expect(words.layers({ layers: 2, final: "a", from: undefined })).toMatch(/for the guess\.$/);
  });

  it("mark what the picture highlights", () => {
    expect(words.partsOf("A *row* of")).toEqual([{ text: "A ", isMarked: false }, { text: "row", isMarked: true }, { text: " of", isMarked: false }]);
    expect(words.quoted(" pie")).toBe("“pie”");
    expect(words.quoted("\n")).toBe("“⏎”");
  });
});
