import { describe, expect, it } from "vitest";
import { answered, BEGIN, drawnAt, FIVE, keysOf, lengthsOf, moved, numRight, PATH, placeAt, readProgress, turnsOf, writeProgress, type Question } from "../src/learn/path";
import { pairOf, type Data } from "../src/scene/data/data";
import type { BlockNumbers, Near, RopeNumbers } from "../src/scene/data/near";
import { looksBack } from "../src/scene/places/play";
import { readCourse } from "../plugins/course";
import { blockNumbers, dataOf, farOf, LAYERS, layerNumbers, SHAPE, TOKENS } from "./scene-given";

const LAST = TOKENS - 1;

const near = (block: BlockNumbers): Near => ({ block });

/** Everything of the whole: the far view, the lens, and what may come next. */
function whole(): Data {
  const far = farOf();
  const candidates = Array.from({ length: 8 }, (_, i) => ({ id: 10 + i, text: ` next${i}`, probability: 0.4 / (i + 1) }));
  const said = { words: Array.from({ length: far.layers * far.columns }, () => " next0"), probabilities: new Float32Array(far.layers * far.columns).fill(0.4) };
  return { ...dataOf(), far, said, next: { candidates } };
}

const question = (id: string): Question => {
  const found = PATH.find((one) => one.id === id);
  if (!found) throw new Error(id);
  return found;
};

/** A head's query turned by its angles, as RoPE does, at a position. */
function turned(position: number, clockwise = false): RopeNumbers {
  const found = blockNumbers("rope", LAST, 2) as RopeNumbers;
  const half = SHAPE.H / 2;
  const qTurned = Float32Array.from(found.q);
  found.frequencies.forEach((frequency, i) => {
    const [a, b, angle] = [found.q[i] as number, found.q[i + half] as number, (clockwise ? -1 : 1) * frequency * position];
    qTurned[i] = a * Math.cos(angle) - b * Math.sin(angle);
    qTurned[i + half] = a * Math.sin(angle) + b * Math.cos(angle);
  });
  return { ...found, qTurned };
}

const withFar = (data: Data, changed: Partial<NonNullable<Data["far"]>>): Data => ({ ...data, far: { ...(data.far as NonNullable<Data["far"]>), ...changed } });

describe("the path", () => {
  const data = whole();

  it("has eight questions, each with two to five different answers", () => {
    expect(PATH).toHaveLength(8);
    for (const one of PATH) {
      const choices = one.choices(data);
      expect(choices.length, one.id).toBeGreaterThan(1);
      expect(choices.length, one.id).toBeLessThan(6);
      expect(new Set(choices.map(({ id }) => id)).size, one.id).toBe(choices.length);
      expect(one.asks(data), one.id).toMatch(/\?$/);
    }
  });

  it("offers the right answer among the others, once its numbers are there", () => {
    const blocks = { row: blockNumbers("row", LAST, 0), position: turned(LAST) } as const;
    for (const one of PATH) {
      const block = blocks[one.id as keyof typeof blocks];
      const there: Data = { ...data, near: { ...(block ? { block } : {}), layer: layerNumbers(looksBack(data).layer) } };
      expect(one.choices(there).map(({ id }) => id), one.id).toContain(one.right(there));
      expect(one.says(there), one.id).not.toMatch(/NaN|undefined/);
    }
  });

  it("says nothing is right before the numbers are there", () => {
    const bare: Data = { ...data, far: undefined, said: undefined, next: undefined, near: undefined };
    for (const id of ["row", "stream", "attention", "position", "mlp", "next", "sure"]) expect(question(id).right(bare), id).toBeUndefined();
    const ofAnother: Data = { ...data, near: { block: blockNumbers("row", 1, 0), layer: layerNumbers((looksBack(data).layer + 1) % LAYERS) } };
    for (const id of ["row", "mlp"]) expect(question(id).right(ofAnother), id).toBeUndefined();
  });

  it("takes its answers from the pass: other numbers, other answers", () => {
    expect(question("tokens").right({ ...data, tokens: data.tokens.slice(0, 5) })).toBe("5");
    expect(question("row").right({ ...data, near: near(blockNumbers("row", LAST, 0)) })).toBe(String(SHAPE.D));
    const [first, end] = lengthsOf(data) as [number, number];
    const far = data.far as NonNullable<Data["far"]>;
    const scaled = (by: number): Data => withFar(data, { lengths: far.lengths.map((value, i) => (i === LAYERS * far.columns + LAST ? (first * by) : value)) });
    expect([0.5, 1.5, 5, 50].map((by) => question("stream").right(scaled(by)))).toEqual(["shorter", "little", "some", "much"]);
    expect(end).toBe(far.lengths[LAYERS * far.columns + LAST]);
    for (const key of [1, 3, LAST - 1]) {
      const attention = far.attention.slice();
      attention[pairOf(far, 4, LAST, key)] = 1.5;
      expect(question("attention").right(withFar(data, { attention }))).toBe(String(key));
      expect(keysOf(withFar(data, { attention }))).toContain(key);
    }
    const sure = (probability: number): Data => ({ ...data, next: { candidates: [{ id: 7, text: " x", probability }] } });
    expect([0.05, 0.1, 0.5, 0.6, 0.99].map((one) => question("sure").right(sure(one)))).toEqual(["10", "30", "60", "100", "100"]);
    expect(question("next").right(sure(0.2))).toBe("7");
    const layer = layerNumbers(looksBack(data).layer);
    const added = (attention: number, mlp: number): Data => ({ ...data, near: { layer: { ...layer, attention: layer.attention.map(() => attention), mlp: layer.mlp.map(() => mlp) } } });
    expect([question("mlp").right(added(1, 2)), question("mlp").right(added(3, 2))]).toEqual(["mlp", "attention"]);
  });

  it("measures how far a query was turned, on the pass's own numbers", () => {
    for (const position of [0, 1, LAST]) expect(turnsOf({ ...data, near: near(turned(position)) })).toBeCloseTo(position, 3);
    expect(question("position").right({ ...data, near: near(turned(LAST)) })).toBe(String(LAST));
    expect(question("position").right({ ...data, near: near(turned(1)) })).toBe("1");
    expect(turnsOf({ ...data, near: near(turned(LAST, true)) })).toBeCloseTo(-LAST, 3);
  });

  it("does not draw what is still asked", () => {
    const seen = (...ids: string[]) => drawnAt(data, (id) => ids.includes(id));
    expect([seen().said, seen().next]).toEqual([undefined, undefined]);
    expect(seen("next").said).toBe(data.said);
    expect(seen("next").next).toBeUndefined();
    expect(seen("next", "sure").next).toBe(data.next);
    PATH.forEach((one, i) => {
      if (i > 0) expect(placeAt(data, i, false)).toEqual((PATH[i - 1] as Question).place(data));
      expect(placeAt(data, i, true)).toEqual(one.place(data));
    });
    expect(placeAt(data, 0, false).depth).toBe(0);
    expect(placeAt(data, PATH.length, false).depth).toBe(0);
  });

  it("ends in five questions, each with a section of the course", () => {
    expect(FIVE).toHaveLength(5);
    const { chapters } = readCourse("../docs/learn");
    for (const { chapter, section, says } of FIVE) {
      expect(chapters.find((one) => one.id === chapter)?.sections.map((one) => one.id)).toContain(section);
      expect(says(data)).toMatch(/\.$/);
    }
  });
});

describe("progress", () => {
  const OF = "model 1 2 3";
  it("goes on only where the open question is answered, and an answer stays", () => {
    expect(moved(BEGIN, 1)).toBe(BEGIN);
    const one = answered(BEGIN, "6");
    expect(answered(one, "7")).toBe(one);
    expect(moved(one, 1).at).toBe(1);
    expect(moved(moved(moved(one, 1), 1), -1).at).toBe(0);
    let all = BEGIN;
    for (const _ of PATH) all = moved(answered(all, "x"), 1);
    expect(all.at).toBe(PATH.length);
    expect(moved(all, 1).at).toBe(PATH.length);
    expect(numRight({ ...all, right: { tokens: "x", row: "y" } })).toBe(1);
  });
  it("is kept for one pass, and nothing broken is taken", () => {
    const one = { ...moved(answered(BEGIN, "6"), 1), right: { tokens: "6" } };
    expect(readProgress(writeProgress(one, OF), OF)).toEqual(one);
    expect(readProgress(writeProgress(one, OF), "another")).toBe(BEGIN);
    for (const wrong of [null, "", "{", "3", "[]", '{"of":"model 1 2 3"}', '{"of":"model 1 2 3","at":-1}', '{"of":"model 1 2 3","at":1.5}']) expect(readProgress(wrong, OF)).toBe(BEGIN);
    expect(readProgress(JSON.stringify({ of: OF, at: 5, chosen: { tokens: "6", other: "1", row: 3 }, right: null }), OF)).toEqual({ at: 1, chosen: { tokens: "6" }, right: {} });
  });
});
