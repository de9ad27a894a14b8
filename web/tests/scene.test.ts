/** Scenes as data: a far mark is a number of the reply, and the camera keeps what it shows. */
import { describe, expect, test } from "vitest";
import { onTheWay, project, unproject } from "../src/scene/places/camera";
import { beginOf, columnOf, middleOf, pairOf, REST, tokenOf, type Data, type Far } from "../src/scene/data/data";
import { readFar } from "../src/scene/data/far";
import { frameOf } from "../src/scene/places/layout";
import { scene } from "../src/scene/scene";
import { sinkOf } from "../src/scene/depths/whole";

const [T, L] = [4, 3];

/** Attention whose shares tell where they stand: rows sum to one, and the second key gets most. */
function farOf(): Far {
  const attention: number[] = [];
  for (let l = 0; l < L; l++)
    for (let q = 0; q < T; q++) for (let k = 0; k <= q; k++) attention.push(q === 0 ? 1 : k === 0 ? 0.5 : k === 1 ? 0.5 - 0.01 * (q - 1) : 0.01);
  const of = (rows: number, at: (row: number, c: number) => number): Float32Array =>
    Float32Array.from({ length: rows * T }, (_, i) => at(Math.floor(i / T), i % T));
  return {
    start: 0, block: 1, columns: T, layers: L, attention: Float32Array.from(attention), lengths: of(L + 1, (l, c) => 10 ** l + c),
    attentionAdded: of(L, () => 0.25), mlpAdded: of(L, (l, c) => 0.1 * (l + 1) + 0.01 * c), keys: of(L, (l) => 5 + l), values: of(L, (l) => 1 + l),
  };
}

function dataOf(far = farOf()): Data {
  const words = Array.from({ length: L * T }, (_, i) => (i < T ? " a" : " b"));
  return {
    extent: { tokens: T, layers: L }, shape: { N: 2, K: 1, H: 4, D: 8, F: 16, V: 32 }, chosen: { pos: T - 1, layer: 1, head: 0 },
    tokens: ["The", " cat", " that", " ran"].map((text, id) => ({ id, text })), far,
    said: { words, probabilities: new Float32Array(L * T).fill(0.5) },
    next: { candidates: [{ id: 1, text: " away", probability: 0.4 }, { id: 2, text: ".", probability: 0.2 }] },
  };
}

const camera = { rect: frameOf({ depth: 0, pos: 0, layer: 0, head: 0 }, { tokens: T, layers: L }), size: { width: 800, height: 500 }, turned: false };

describe("the whole", () => {
  const data = dataOf();
  const marks = scene(data, camera);
  const find = (id: string) => marks.find((one) => one.id === id);

  test("every mark has a name of its own", () => {
    expect(new Set(marks.map((one) => one.id)).size).toBe(marks.length);
  });

  test("marks say the numbers of the reply", () => {
    expect(find("c2.l1.stream")?.says?.value).toBe(data.far?.lengths[2 * T + 2]);
    expect(find("c3.l2.mlp")?.says?.value).toBe(data.far?.mlpAdded[2 * T + 3]);
    expect(find("l1.q3.k1")?.says?.value).toBeCloseTo(0.48, 6);
    expect(find("c1.l2.key")?.says?.value).toBe(7);
    expect(find("next1")?.says?.value).toBe(0.2);
  });

  test("the sink is no curve but a ring of its mean share", () => {
    expect(marks.some((one) => /^l\d+\.q\d+\.k0$/.test(one.id))).toBe(false);
    expect(find("l0.sink")?.says?.value).toBe(sinkOf(farOf(), 0));
    expect(sinkOf(farOf(), 0)).toBeCloseTo(0.5, 6);
  });

  test("words of the lens stand where they become the first one, beside the chosen token alone", () => {
    const words = (pos: number) => scene({ ...data, chosen: { ...data.chosen, pos } }, camera).filter((one) => one.id.endsWith(".word"));
    expect(words(3).map((one) => one.id)).toEqual(["c3.l0.word", "c3.l1.word"]);
    expect(words(2).map((one) => one.id)).toEqual(["c2.l0.word", "c2.l1.word"]);
    expect(words(2).map((one) => (one.kind === "text" ? one.text : ""))).toEqual(["␣a", "␣b"]);
  });

  test("a guess with a space before it looks unlike the same without", () => {
    const next = { candidates: [{ id: 1, text: " pie", probability: 0.4 }, { id: 2, text: "pie", probability: 0.2 }] };
    const names = scene({ ...data, next }, camera).filter((one) => one.kind === "text" && /^next\d\.name$/.test(one.id));
    expect(names.map((one) => (one.kind === "text" ? one.text.split("  ")[0] : ""))).toEqual(["␣pie", "pie"]);
  });

  test("of the next tokens as many have a bar as have room", () => {
    const next = { candidates: Array.from({ length: 8 }, (_, id) => ({ id, text: ` w${id}`, probability: 0.1 })) };
    const bars = (height: number) => scene({ ...data, next }, { ...camera, size: { width: 800, height } }).filter((one) => /^next\d$/.test(one.id)).length;
    expect([bars(900), bars(120), bars(20)]).toEqual([6, 3, 1]);
  });

  test("what the pass has not reached is not drawn, and nothing else appears", () => {
    const half = scene(data, camera, { from: 0, height: 1.6, share: 1 });
    const all = new Set(marks.map((one) => one.id));
    expect(half.every((one) => all.has(one.id))).toBe(true);
    expect(half.some((one) => one.id === "c0.l0.stream")).toBe(true);
    expect(half.some((one) => one.id === "c0.l1.stream")).toBe(false);
    expect(half.some((one) => one.id === "next0")).toBe(false);
  });

  test("older columns stand while a new one rises", () => {
    const step = scene(data, camera, { from: 3, height: 0.7, share: 1 });
    expect(step.some((one) => one.id === "c2.l2.stream")).toBe(true);
    expect(step.some((one) => one.id === "c3.l2.stream")).toBe(false);
  });

  test("at rest the same list comes again, for the painter", () => {
    expect(scene(data, camera, REST)).toEqual(marks);
  });
});

describe("folded layers", () => {
  const layers = 30;
  const pairs = (T * (T + 1)) / 2;
  const of = (count: number, size: number) => Float32Array.from({ length: count * size }, (_, i) => 0.1 + 0.2 * Math.abs(Math.sin(i)));
  const far: Far = {
    start: 0, block: 1, columns: T, layers, attention: of(layers, pairs), lengths: of(layers + 1, T), attentionAdded: of(layers, T), mlpAdded: of(layers, T),
    keys: of(layers, T), values: of(layers, T),
  };
  const extent = { tokens: T, layers };
  const said = { words: Array.from({ length: layers * T }, (_, i) => ` w${Math.floor(i / T)}`), probabilities: new Float32Array(layers * T).fill(0.5) };
  const data: Data = { ...dataOf(far), extent, said, isFolded: true };
  const whole = { ...camera, rect: frameOf({ depth: 0, pos: 0, layer: 0, head: 0 }, extent) };
  const marks = scene(data, whole);
  const find = (id: string) => marks.find((one) => one.id === id);
  const mean = (values: Float32Array, size: number, at: number, first: number, last: number) =>
    Array.from({ length: last + 1 - first }, (_, i) => values[(first + i) * size + at] as number).reduce((a, b) => a + b, 0) / (last + 1 - first);

  test("are six bands, which say which layers they are", () => {
    const streams = marks.filter((one) => /^c3\.l\d+\.stream$/.test(one.id));
    expect(streams.map((one) => one.enter?.layer)).toEqual([0, 5, 10, 15, 20, 25]);
    expect(find("c3.l5.mlp")?.says?.name).toBe("layers 5 to 9: what the MLP adds to “ ran”, relative to the stream, mean of the layers");
    expect(scene({ ...data, isFolded: false }, whole).filter((one) => /^c3\.l\d+\.stream$/.test(one.id))).toHaveLength(layers);
  });

  test("show the mean of their layers, and lengths and words after the last", () => {
    expect(find("c3.l5.stream")?.says).toEqual({ name: "stream of “ ran” after layer 9", value: far.lengths[10 * T + 3], unit: "length" });
    expect(find("c2.l10.mlp")?.says?.value).toBeCloseTo(mean(far.mlpAdded, T, 2, 10, 14), 6);
    expect(find("c1.l25.key")?.says?.value).toBeCloseTo(mean(far.keys, T, 1, 25, 29), 6);
    expect(find("l15.q3.k1")?.says?.value).toBeCloseTo(mean(far.attention, pairs, pairOf(far, 0, 3, 1), 15, 19), 6);
    expect(marks.filter((one) => one.id.endsWith(".word")).map((one) => (one.kind === "text" ? one.text : ""))).toEqual(["␣w29", "␣w24", "␣w19", "␣w14", "␣w9", "␣w4"].toReversed());
  });

  test("rise with the pass: a band is there once its last layer is", () => {
    const half = scene(data, whole, { from: 0, height: 9.5, share: 1 });
    expect(half.some((one) => one.id === "c0.l0.stream")).toBe(true);
    expect(half.some((one) => one.id === "c0.l5.stream")).toBe(false);
  });
});

test("of a long text the columns are every so many tokens, the last one among them", () => {
  const far = { ...farOf(), start: 2, block: 3 };
  expect([0, 1, 3].map((c) => tokenOf(far, c))).toEqual([2, 5, 11]);
  expect([0, 2, 3, 5, 11].map((pos) => Math.abs(columnOf(far, pos)))).toEqual([0, 0, 1, 1, 3]);
  expect(middleOf(far, 0)).toBe(1);
  expect(pairOf(far, 0, 1, 0)).toBe(1); // no column is before
});

test("a window's rows of attention begin with the columns before it", () => {
  const far = { ...farOf(), start: 2, columns: 2 };
  expect(pairOf(far, 0, 0, 0)).toBe(0);
  expect(pairOf(far, 0, 1, 0)).toBe(3);
  expect(pairOf(far, 1, 0, 0)).toBe(7);
  expect(middleOf(far, 1)).toBe(3);
});

describe("a long text in blocks", () => {
  const [tokens, block, columns] = [1500, 24, 63];
  const pairs = (columns * (columns + 1)) / 2;
  const window = { start: (tokens - 1) % block, stop: tokens, block, isMean: true };
  const values = Float32Array.from({ length: (5 * L + 1) * columns + L * pairs }, (_, i) => (i < (5 * L + 1) * columns ? 10 + (i % 7) : 0.001 * (1 + (i % 97))));
  const far = readFar(values, window, L);
  const data: Data = { ...dataOf(far), extent: { tokens, layers: L }, tokens: Array.from({ length: tokens }, (_, id) => ({ id, text: ` w${id}` })), said: undefined, chosen: { pos: tokens - 1, layer: 1, head: 0 } };
  const seen = scene(data, { ...camera, rect: frameOf({ depth: 0, pos: 0, layer: 0, head: 0 }, data.extent) });

  test("every token is in one column, whose numbers are said to be means", () => {
    expect([beginOf(far, 0), beginOf(far, 1), tokenOf(far, columns - 1)]).toEqual([0, 12, tokens - 1]);
    const stream = seen.find((one) => one.id === "c1.l0.stream");
    expect(stream?.says).toEqual({ name: "stream of tokens 12 to 35 after layer 0, mean", value: far.lengths[columns + 1], unit: "length" });
    expect(stream?.enter?.pos).toBe(35);
  });

  test("the three largest shares of each block are drawn, the larger the stronger", () => {
    const curves = seen.filter((one) => one.kind === "curve" && one.id.startsWith("l1.q62."));
    const row = Array.from({ length: 61 }, (_, i) => far.attention[pairOf(far, 1, 62, i + 1)] as number);
    expect(curves.map((one) => one.says?.value).toSorted().toReversed()).toEqual(row.toSorted().toReversed().slice(0, 3));
    const widths = curves.toSorted((a, b) => Number(a.says?.value) - Number(b.says?.value)).map((one) => (one.kind === "curve" ? one.width : 0));
    expect(widths).toEqual(widths.toSorted((a, b) => a - b));
    expect(widths[0]).toBeGreaterThan(1); // 9 % of 24 tokens are seen
    expect(curves[0]?.says?.name).toMatch(/the most that one of tokens 1476 to 1499 takes from tokens \d+ to \d+, mean of the heads/);
    expect(seen.length).toBeLessThan(64 * L * 13);
  });
});

test("where tokens look ahead every row has all columns, and what comes later is drawn too", () => {
  const whole = readFar(Float32Array.from({ length: (5 * L + 1) * T + L * T * T }, (_, i) => 0.1 + 0.01 * (i % 5)), { start: 0, stop: T, block: 1 }, L);
  const ahead = scene({ ...dataOf(whole), said: undefined }, camera).find((one) => one.id === "l1.q1.k3");
  expect([whole.isWhole, farOf().isWhole]).toEqual([true, undefined]);
  expect(ahead?.says?.value).toBe(whole.attention[T * T + T + 3]);
  expect(() => readFar(new Float32Array((5 * L + 1) * T + 7), { start: 0, stop: T, block: 1 }, L)).toThrow("numbers came for 4 columns");
});

describe("the camera", () => {
  test("a point goes to a pixel and back, turned and not", () => {
    for (const turned of [false, true]) {
      const at = project({ ...camera, turned }, [1.5, 2.25]);
      const [x, y] = unproject({ ...camera, turned }, at);
      expect(x).toBeCloseTo(1.5);
      expect(y).toBeCloseTo(2.25);
    }
  });

  test("a flight begins and ends at its ends", () => {
    const to = { x0: 1, x1: 2, y0: 1, y1: 1.5 };
    expect(onTheWay(camera.rect, to, 0)).toEqual(camera.rect);
    const end = onTheWay(camera.rect, to, 1);
    for (const side of ["x0", "x1", "y0", "y1"] as const) expect(end[side]).toBeCloseTo(to[side]);
  });
});
