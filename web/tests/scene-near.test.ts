/** The depths below the whole as data: what stands in them, that it adds up, and that it can be read. */

import { describe, expect, it } from "vitest";
import { block } from "../src/scene/depths/block";
import { weighted, keysOf } from "../src/scene/blocks/attention";
import { cutBy } from "../src/scene/blocks/logits";
import { partsAfter } from "../src/scene/blocks/text";
import { project, type Camera } from "../src/scene/places/camera";
import { pairOf, REST, type Far } from "../src/scene/data/data";
import { inside } from "../src/scene/depths/entered";
import { layer, looks } from "../src/scene/depths/layer";
import { rectOf } from "../src/scene/places/layout";
import { SIZES, widthOf } from "../src/scene/marks/look";
import type { Mark, Text } from "../src/scene/marks/marks";
import type { Near } from "../src/scene/data/near";
import { number, stepsOf, termsOf } from "../src/scene/depths/number";
import type { Block, Place, Product } from "../src/scene/places/place";
import { product } from "../src/scene/depths/product";
import { scene, sheets } from "../src/scene/scene";
import { blockOf } from "../src/scene/places/sheet";
import { blockNumbers, cameraAt, dataOf, LARGE, LAYERS, layerNumbers, PHONE, PLAYING, productNumbers, SHAPE, TOKENS, WIDE } from "./scene-given";

const [POS, LAYER, HEAD] = [5, 3, 1];
const BLOCKS: readonly Block[] = ["text", "row", "norm", "qkv", "rope", "attention", "heads", "mlp_norm", "mlp", "logits"];
const PRODUCTS: readonly Product[] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head", "embed_tokens"];
const SIZES_OF_PICTURE = [["wide", WIDE], ["playing", PLAYING], ["phone", PHONE], ["large", { width: 1240, height: 640 }]] as const;

const HERE = { pos: POS, layer: LAYER, head: HEAD };

/** Every place below the whole, with its numbers. */
const PLACES: readonly (readonly [name: string, place: Place, near: Near])[] = [
  ["layer", { ...HERE, depth: 1 }, { layer: layerNumbers(LAYER) }],
  ...BLOCKS.map((name) => [name, { ...HERE, depth: 2 as const, block: name }, { layer: layerNumbers(LAYER), block: blockNumbers(name, POS, LAYER) }] as const),
  ...PRODUCTS.flatMap((name) =>
    ([3, 4] as const).map((depth) => [
      `${name} at ${depth}`, { ...HERE, depth, block: blockOf(name), product: name, row: 9 },
      { layer: layerNumbers(LAYER), block: blockNumbers(blockOf(name), POS, LAYER), product: productNumbers(name, POS, LAYER, 9, name === "o_proj") },
    ] as const),
  ),
];

interface Boxed {
  readonly id: string;
  readonly text: string;
  readonly left: number;
  readonly right: number;
  readonly top: number;
  readonly bottom: number;
}

/** Where a text lies in the picture, in pixels. */
function boxOf(mark: Text, camera: Camera): Boxed {
  const [x, y] = project(camera, mark.at);
  const wide = Math.min(mark.most ?? Infinity, widthOf(mark.text, mark.size, mark.mono));
  const [dx, dy] = mark.shift ?? [0, 0];
  const left = x + dx - (mark.align === "left" ? 0 : mark.align === "center" ? wide / 2 : wide);
  const high = 0.8 * SIZES[mark.size];
  return { id: mark.id, text: mark.text, left, right: left + wide, top: y + dy - high / 2, bottom: y + dy + high / 2 };
}

const areOver = (a: Boxed, b: Boxed): boolean => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;

/** The texts of a place that lie over each other, or stick out of the picture. */
export function collisions(marks: readonly Mark[], camera: Camera): string[] {
  const texts = marks.filter((mark): mark is Text => mark.kind === "text" && (mark.alpha ?? 1) > 0.3 && mark.text !== "+").map((mark) => boxOf(mark, camera));
  const over = texts.flatMap((a, i) => texts.slice(i + 1).filter((b) => areOver(a, b)).map((b) => `${a.id} “${a.text}” over ${b.id} “${b.text}”`));
  const isPart = (one: Boxed): boolean => one.right > 0 && one.left < camera.size.width && one.bottom > 0 && one.top < camera.size.height;
  const out = texts.filter(isPart).filter((one) => one.left < -2 || one.right > camera.size.width + 2 || one.top < -2 || one.bottom > camera.size.height + 2);
  return [...over, ...out.map((one) => `${one.id} “${one.text}” out: ${[one.left, one.right, one.top, one.bottom].map(Math.round).join()}`)];
}

describe.each(PLACES)("%s", (_, place, near) => {
  const data = dataOf(near, HERE);

  it.each(SIZES_OF_PICTURE)("can be read on a %s picture", (__, size) => {
    const camera = cameraAt(place, size);
    expect(collisions(scene(data, camera), camera)).toEqual([]);
  });

  it.each(SIZES_OF_PICTURE)("has one sheet on a %s picture, whose marks have names of their own and lie in it", (__, size) => {
    const camera = cameraAt(place, size);
    const seen = sheets(data, camera);
    expect(seen.map((one) => [one.name, one.strength > 0.99])).toEqual([[["whole", "layer", "block", "product", "number"][place.depth], true]]);
    const marks = seen[0]?.marks ?? [];
    expect(new Set(marks.map((mark) => mark.id)).size).toBe(marks.length);
    expect(marks.filter((mark) => mark.says).length).toBeGreaterThan(0);
    for (const mark of marks) {
      if (mark.kind !== "cells" && mark.kind !== "box") continue;
      expect(mark.rect.x0, mark.id).toBeLessThanOrEqual(mark.rect.x1);
      expect(mark.rect.y0, mark.id).toBeLessThanOrEqual(mark.rect.y1);
      if (mark.kind === "cells") expect(mark.values.length, mark.id).toBe(mark.rows * mark.columns);
    }
  });

  it("shows nothing that is not there at rest while it is computed", () => {
    const camera = cameraAt(place, WIDE);
    const atRest = new Set(scene(data, camera).map((mark) => mark.id));
    for (const share of [0, 0.2, 0.5, 0.8]) {
      const marks = scene(data, camera, { ...REST, share });
      expect(marks.filter((mark) => !atRest.has(mark.id)).map((mark) => mark.id)).toEqual([]);
    }
  });
});

describe("of many heads and tokens", () => {
  const places: readonly (readonly [string, Place, Near])[] = [
    ["layer", { ...HERE, depth: 1 }, { layer: layerNumbers(LAYER, LARGE) }],
    ...BLOCKS.map((name) => [name, { ...HERE, depth: 2 as const, block: name }, { block: blockNumbers(name, POS, LAYER, HEAD, LARGE) }] as const),
  ];

  it.each(places)("%s can be read", (_, place, near) => {
    const data = dataOf(near, HERE, LARGE);
    for (const [, size] of SIZES_OF_PICTURE) {
      const camera = cameraAt(place, size, data.extent);
      expect(collisions(scene(data, camera), camera)).toEqual([]);
    }
  });
});

describe("a layer", () => {
  const numbers = layerNumbers(LAYER);
  const data = dataOf({ layer: numbers }, HERE);
  const marks = layer.marks(data, cameraAt({ ...HERE, depth: 1 }, WIDE), REST);

  it("has the chosen head's curves with their exact shares, and they make the far view's curve with those of the others", () => {
    const { N } = SHAPE;
    const far = { start: 0, block: 1, columns: TOKENS, layers: LAYERS } as Far;
    for (let query = 1; query < TOKENS; query++) {
      for (let key = 0; key < query; key++) {
        const shares = Array.from({ length: N }, (_, head) => numbers.pattern[(head * TOKENS + query) * TOKENS + key] as number);
        const mine = marks.find((mark) => mark.id === `n.h${HEAD}.q${query}.k${key}`);
        expect(mine?.says?.value).toBe(shares[HEAD]);
        expect(pairOf(far, LAYER, query, key)).toBe(LAYER * 28 + (query * (query + 1)) / 2 + key);
        const drawn = Array.from({ length: N }, (_, head) => marks.find((mark) => mark.id === `n.h${head}.q${query}.k${key}`)?.says?.value as number | undefined);
        if (key > 0 && shares.every((share) => share > 0.04)) {
          expect(drawn.reduce<number>((sum, share) => sum + (share ?? NaN), 0) / N).toBeCloseTo(shares.reduce((a, b) => a + b, 0) / N, 6);
        }
      }
    }
  });

  it("draws of the other heads what is strong enough, and no sink", () => {
    const others = looks(numbers, SHAPE.N, HEAD).filter((one) => one.head !== HEAD);
    expect(others.length).toBeGreaterThan(5);
    expect(others.every((one) => one.share >= 0.03 && one.key > 0)).toBe(true);
  });

  it("tells the lengths of stream and additions exactly", () => {
    const said = new Map(marks.map((mark) => [mark.id, mark.says?.value]));
    expect(said.get("n.t4.before")).toBe(numbers.before[4]);
    expect(said.get("n.t4.middle")).toBe(numbers.middle[4]);
    expect(said.get("n.t4.after")).toBe(numbers.after[4]);
    expect(said.get("n.t4.a.adds")).toBeCloseTo((numbers.attention[4] as number) / (numbers.middle[4] as number), 12);
    expect(said.get("n.t4.m.adds")).toBeCloseTo((numbers.mlp[4] as number) / (numbers.after[4] as number), 12);
    expect(said.get("n.t4.a.norm")).toBe(numbers.rms[4]);
  });

  it("leaves out what the pass has not reached", () => {
    const camera = cameraAt({ ...HERE, depth: 1 }, WIDE);
    const half = layer.marks(data, camera, { from: 5, height: LAYER + 0.5, share: 1 });
    const ids = new Set(half.map((mark) => mark.id));
    expect(ids.has("n.t4.m.adds") && ids.has("n.t5.a.adds")).toBe(true);
    expect(ids.has("n.t5.m.adds")).toBe(false);
  });

  it("lets heads of a group share a hue, and groups differ", () => {
    const hues = new Map(marks.filter((mark) => mark.kind === "curve").map((mark) => [mark.id.split(".")[1], mark.hue]));
    expect(hues.get("h0")).toBe(hues.get("h1"));
    expect(hues.get("h2")).toBe(hues.get("h3"));
    expect(hues.get("h0")).not.toBe(hues.get("h2"));
  });
});

describe("a block", () => {
  it("has shares times values whose sum is what the head gathers", () => {
    const numbers = blockNumbers("attention", POS, LAYER);
    if (numbers.block !== "attention") throw new Error("another block");
    const taken = weighted(numbers, SHAPE.H);
    for (let i = 0; i < SHAPE.H; i++) {
      let sum = 0;
      for (let key = 0; key < TOKENS; key++) sum += taken[key * SHAPE.H + i] as number;
      expect(sum).toBeCloseTo(numbers.out[i] as number, 5);
    }
  });

  it("keeps the first key, which may be the sink, and the last ones where not all have room", () => {
    expect(keysOf(6, 7, 20)).toEqual([0, 1, 2, 3, 4, 5, 6]);
    expect(keysOf(3, 7, 20)).toEqual([0, 1, 2, 3, 4, 5, 6]);
    expect(keysOf(50, 60, 8)).toEqual([0, 47, 48, 49, 50, 51, 52, 53]);
  });

  it("draws keys before the window as the mask's, with neither share nor value", () => {
    const numbers = blockNumbers("attention", POS, LAYER);
    if (numbers.block !== "attention") throw new Error("another block");
    const first = POS - 2; // the first key of a window of 3
    const near = { ...numbers, scores: numbers.scores.map((score, key) => (key < first ? -Infinity : score)), pattern: numbers.pattern.map((share, key) => (key < first ? 0 : share)) };
    const ids = block.marks(dataOf({ block: near }, HERE), cameraAt({ ...HERE, depth: 2, block: "attention" }, WIDE), REST).map((mark) => mark.id.split(".").at(-1));
    for (let key = 0; key <= POS; key++) {
      expect(ids.includes(`mask${key}`)).toBe(key < first);
      expect(ids.includes(`share${key}`)).toBe(key >= first);
      expect(ids.includes(`score${key}`)).toBe(key >= first);
    }
  });

  it("turns hands by position times frequency, all the way at rest", () => {
    const data = dataOf({ block: blockNumbers("rope", POS, LAYER) }, HERE);
    const camera = cameraAt({ ...HERE, depth: 2, block: "rope" }, WIDE);
    const angle = (id: string, share: number): number => {
      const mark = block.marks(data, camera, { ...REST, share }).find((one) => one.id === id);
      return mark?.kind === "hand" ? mark.angle : NaN;
    };
    expect(angle("b.rope.q1.after", 0)).toBe(angle("b.rope.q1.before", 0));
    expect(angle("b.rope.q1.after", 1) - angle("b.rope.q1.before", 1)).toBeCloseTo(POS * 0.1, 12);
    expect(angle("b.rope.q1.after", 0.5) - angle("b.rope.q1.before", 0.5)).toBeCloseTo((POS * 0.1) / 2, 12);
  });

  it("knows which step of the sampler cut a token", () => {
    const numbers = blockNumbers("logits", POS, LAYER);
    if (numbers.block !== "logits" || !numbers.sampled) throw new Error("another block");
    expect([1, 3, 4, 7].map((id) => cutBy(numbers.sampled!, id))).toEqual([undefined, "top_p", "top_p", "top_k"]);
  });

  it("merges bytes into the token", () => {
    const numbers = blockNumbers("text", POS, LAYER);
    if (numbers.block !== "text" || !numbers.piece) throw new Error("another block");
    const { bytes, piece } = numbers;
    expect(partsAfter(bytes, piece.merges, 0).map((part) => part.text)).toEqual(["␣", "c", "h", "a", "s", "e", "d"]);
    expect(partsAfter(bytes, piece.merges, 4).map((part) => part.text)).toEqual(["␣ch", "as", "ed"]);
    expect(partsAfter(bytes, piece.merges, 6).map((part) => [part.text, part.isFresh])).toEqual([["␣chased", true]]);
  });
});

describe("keys", () => {
  it("go in to the end, and each way in lies in what it came from", () => {
    const data = dataOf({ block: blockNumbers("mlp", POS, LAYER) }, HERE);
    const way: Place[] = [{ ...HERE, depth: 0 }];
    for (let to = inside(way[0] as Place, data); to; to = inside(to, data)) way.push(to);
    expect(way.map((place) => [place.depth, place.block])).toEqual([[0, undefined], [1, undefined], [2, "attention"]]);
    for (const block of ["qkv", "heads", "mlp", "logits", "row"] as const) {
      const product = inside({ ...HERE, depth: 2, block }, data);
      expect(product && blockOf(product.product as Product)).toBe(block);
      expect(product && inside(product, data)?.depth).toBe(block === "row" ? undefined : 4);
    }
    expect(inside({ ...HERE, depth: 2, block: "mlp" }, data)?.row).toBe(0); // the strongest neuron
  });
});

describe("a number", () => {
  it.each([[false, 1e-5], [true, 0.02]] as const)("is the sum of what is drawn (inputs rounded: %s)", (isRounded, most) => {
    const numbers = productNumbers("up_proj", POS, LAYER, 9, isRounded);
    const sum = termsOf(numbers);
    const steps = stepsOf(sum, 6, isRounded);
    expect(steps.reduce((all, one) => all + one.value, 0)).toBeCloseTo(numbers.output[9 - numbers.first] as number, 10);
    expect(Math.abs(sum.rounding)).toBeLessThan(most);
    expect(steps.slice(0, 6).map((one) => Math.abs(one.value))).toEqual(steps.slice(0, 6).map((one) => Math.abs(one.value)).toSorted((a, b) => b - a));
    expect(sum.terms).toHaveLength(SHAPE.D);
    const marks = number.marks(dataOf({ product: numbers }, HERE), cameraAt({ ...HERE, depth: 4, block: "mlp", product: "up_proj", row: 9 }, WIDE), REST);
    expect(marks.find((mark) => mark.id === "s.total")?.says?.value).toBe(numbers.output[9 - numbers.first]);
  });
});

describe("a product", () => {
  it("draws the row's own weights and output, and each cell enters its row", () => {
    const numbers = productNumbers("gate_proj", POS, LAYER);
    const marks = product.marks(dataOf({ product: numbers }, HERE), cameraAt({ ...HERE, depth: 3, block: "mlp", product: "gate_proj" }, WIDE), REST);
    const weights = marks.find((mark) => mark.id === "p.weights");
    if (weights?.kind !== "cells") throw new Error("no weights");
    expect([...weights.values.slice(8 * weights.columns, 9 * weights.columns)]).toEqual([...numbers.weights.slice(8 * SHAPE.D, 9 * SHAPE.D)]);
    expect(weights.cell?.(8, 3)).toMatchObject({ name: "W_gate[9, 3]", enter: { depth: 4, product: "gate_proj", row: 9, block: "mlp", pos: POS, layer: LAYER } });
  });

  it.each([false, true])("lies in its block, and a number in it (turned: %s)", (turned) => {
    const extent = { tokens: TOKENS, layers: LAYERS };
    for (const name of PRODUCTS) {
      const place = { ...HERE, block: blockOf(name), product: name };
      const [outer, matrix, one] = ([2, 3, 4] as const).map((depth) => rectOf({ ...place, depth }, extent, turned));
      for (const [a, b] of [[outer, matrix], [matrix, one]]) {
        if (!a || !b) throw new Error("no rectangle");
        expect(b.x0 >= a.x0 && b.x1 <= a.x1 + 1e-12 && b.y0 >= a.y0 && b.y1 <= a.y1 + 1e-12 && b.x1 > b.x0 && b.y1 > b.y0).toBe(true);
      }
    }
  });
});
