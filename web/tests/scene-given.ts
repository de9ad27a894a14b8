/** A small pass, made by hand: what the scenes' tests are drawn from. Its numbers follow from each other as a model's do. */

import type { Camera, Size } from "../src/scene/places/camera";
import type { Data, Far } from "../src/scene/data/data";
import { frameOf } from "../src/scene/places/layout";
import type { BlockNumbers, LayerNumbers, Near, ProductNumbers } from "../src/scene/data/near";
import type { Block, Place } from "../src/scene/places/place";

export const SHAPE = { N: 4, K: 2, H: 8, D: 32, F: 48, V: 50 };
export const TOKENS = 7;
export const LAYERS = 6;
export const WORDS = ["The", " cat", " that", " the", " dog", " chased", " ran"];

/** Numbers that look random and are the same each time. */
export function numbers(count: number, seed: number): Float32Array {
  return Float32Array.from({ length: count }, (_, i) => Math.sin(12.9898 * (i + 1) + 78.233 * seed) * 2);
}

const cells = (count: number, seed: number): Float32Array => numbers(count, seed).map((value) => 1 + Math.abs(value));

const positive = (count: number, seed: number): Float64Array => Float64Array.from(cells(count, seed));

export function softmax(scores: readonly number[]): number[] {
  const most = Math.max(...scores);
  const all = scores.map((score) => Math.exp(score - most));
  const sum = all.reduce((a, b) => a + b, 0);
  return all.map((one) => one / sum);
}

/** A model's sizes and a text. */
export interface Given {
  readonly shape: typeof SHAPE;
  readonly layers: number;
  readonly words: readonly string[];
}

export const SMALL: Given = { shape: SHAPE, layers: LAYERS, words: WORDS };

/** Of many heads and tokens, as large models have them. */
export const LARGE: Given = {
  shape: { N: 32, K: 8, H: 16, D: 64, F: 96, V: 128_256 }, layers: 32, words: Array.from({ length: 24 }, (_, i) => [" chased", " the", "\n", " international"][i % 4] as string),
};

export function layerNumbers(layer: number, of: Given = SMALL): LayerNumbers {
  const { N, K } = of.shape;
  const pattern = new Float32Array(N * of.words.length * of.words.length);
  for (let head = 0; head < N; head++) {
    for (let t = 0; t < of.words.length; t++) pattern.set(softmax([...numbers(t + 1, head + t)]), (head * of.words.length + t) * of.words.length);
  }
  return {
    layer, start: 0, count: of.words.length, sources: of.words.length, pattern, frequency: 1,
    before: positive(of.words.length, 1), middle: positive(of.words.length, 2), after: positive(of.words.length, 3), rms: positive(of.words.length, 4), middleRms: positive(of.words.length, 5),
    attention: positive(of.words.length, 6), mlp: positive(of.words.length, 7), queries: cells(of.words.length * N, 8), keys: cells(of.words.length * K, 9), values: cells(of.words.length * K, 10),
  };
}

export function blockNumbers(block: Block, pos: number, layer: number, head = 1, of: Given = SMALL): BlockNumbers {
  const { N, K, H, D, F } = of.shape;
  const at = { pos, layer };
  switch (block) {
    case "norm":
    case "mlp_norm": return { ...at, block, before: numbers(D, 1), gamma: numbers(D, 2), after: numbers(D, 3), eps: 1e-5 };
    case "qkv": return { ...at, block, input: numbers(D, 1), q: numbers(N * H, 2), k: numbers(K * H, 3), v: numbers(K * H, 4) };
    case "rope": return { ...at, block, head, frequencies: [1, 0.1, 0.01, 0.001], q: numbers(H, 1), qTurned: numbers(H, 2), k: numbers(H, 3), kTurned: numbers(H, 4) };
    case "attention": {
      const scores = Float32Array.from({ length: of.words.length }, (_, i) => (i > pos ? -Infinity : Math.sin(3 * i) * 4));
      const pattern = Float32Array.from(softmax([...scores]));
      const values = numbers(of.words.length * H, 5);
      const out = Float32Array.from({ length: H }, (_, i) => pattern.reduce((sum, share, key) => sum + share * (values[key * H + i] as number), 0));
      return { ...at, block, head, scores, pattern, values, out };
    }
    case "heads": {
      const added = numbers(N * D, 2);
      const out = Float32Array.from({ length: D }, (_, i) => Array.from({ length: N }, (__, n) => added[n * D + i] as number).reduce((a, b) => a + b, 0));
      return { ...at, block, gathered: numbers(N * H, 1), added, norms: [1, 2, 3, 4], shares: [0.5, -0.2, 0.4, 0.3], out, rounding: 0.01 };
    }
    case "mlp": {
      const neurons = Array.from({ length: 12 }, (_, index) => ({ index, gate: 1.5 - index / 4, act: 1 - index / 9, up: index - 5.5, gated: (1 - index / 9) * (index - 5.5), by_token: [] }));
      return { ...at, block, input: numbers(D, 1), gate: numbers(F, 2), act: numbers(F, 3), up: numbers(F, 4), gated: numbers(F, 5), out: numbers(D, 6), neurons };
    }
    case "text": {
      const bytes = [...new TextEncoder().encode(" chased")];
      const piece = (text: string) => ({ text, bytes: [...new TextEncoder().encode(text)] });
      const merge = (start: number, left: string, right: string, rank: number) => ({ start, left: piece(left), right: piece(right), result: piece(left + right), rank });
      const merges = [merge(5, "e", "d", 30), merge(1, "c", "h", 90), merge(3, "a", "s", 40), merge(0, " ", "ch", 500), merge(0, " ch", "as", 9000), merge(0, " chas", "ed", 20000)];
      return { ...at, block, id: 41, text: " chased", bytes, piece: { text: " chased", ids: [41], merges } };
    }
    case "row": return { ...at, block, id: 33, text: " ran", row: numbers(D, 1) };
    case "logits": {
      const probabilities = [0.3, 0.2, 0.15, 0.1, 0.06, 0.05, 0.04, 0.03, 0.02, 0.01];
      const candidates = probabilities.map((probability, i) => ({ token_id: i, text: ` word${i}`, logit: Math.log(probability), probability, logprob: Math.log(probability) }));
      const all = candidates.map(({ token_id, text, logit, probability }) => ({ token_id, text, logit, probability }));
      const left = all.slice(0, 3).map((one) => ({ ...one, probability: one.probability / 0.65 }));
      const steps = [{ name: "logits", is_on: true, num_left: 50, candidates: all }, { name: "top_k", is_on: true, num_left: 5, candidates: all.slice(0, 5) }, { name: "top_p", is_on: true, num_left: 3, candidates: left }];
      return { ...at, block, input: numbers(D, 1), candidates, temperature: 0.8, sampled: { draw: null, place: 0, seed: 0, text: " word1", token_id: 1, steps } };
    }
  }
}

export function productNumbers(product: ProductNumbers["product"], pos: number, layer: number, row = 9, isRounded = false): ProductNumbers {
  const { D } = SHAPE;
  const [rows, first] = [16, Math.max(0, row - 8)];
  const [weights, input] = [numbers(rows * D, 1), numbers(D, 2)];
  const output = Float32Array.from({ length: rows }, (_, r) => input.reduce((sum, x, i) => sum + x * (weights[r * D + i] as number), 0) + (isRounded ? 0.01 : 0));
  return { product, pos, layer, head: 1, row, first, weights, columns: D, of: 48, input: product === "embed_tokens" ? undefined : input, output, isRounded };
}

export function dataOf(near: Near | undefined = undefined, chosen = { pos: 6, layer: 3, head: 1 }, { shape, layers, words }: Given = SMALL): Data {
  return { extent: { tokens: words.length, layers }, shape, tokens: words.map((text, id) => ({ id, text })), chosen, near };
}

/** The far view of the same numbers: each layer has those of `layerNumbers`. */
export function farOf(): Far {
  const { N } = SHAPE;
  const layers = Array.from({ length: LAYERS }, (_, layer) => layerNumbers(layer));
  const attention = layers.flatMap(({ pattern }) =>
    Array.from({ length: TOKENS }, (_, query) =>
      Array.from({ length: query + 1 }, (__, key) => Array.from({ length: N }, (___, head) => pattern[(head * TOKENS + query) * TOKENS + key] as number).reduce((a, b) => a + b, 0) / N),
    ).flat(),
  );
  const each = (of: (one: LayerNumbers, t: number) => number): Float32Array => Float32Array.from(layers.flatMap((one) => Array.from({ length: TOKENS }, (_, t) => of(one, t))));
  return {
    start: 0, block: 1, columns: TOKENS, layers: LAYERS, attention: Float32Array.from(attention),
    lengths: Float32Array.from([...(layers[0] as LayerNumbers).before, ...each((one, t) => one.after[t] as number)]),
    attentionAdded: each((one, t) => (one.attention[t] as number) / (one.middle[t] as number)), mlpAdded: each((one, t) => (one.mlp[t] as number) / (one.after[t] as number)),
    keys: each(() => 1), values: each(() => 1),
  };
}

/** The pictures of windows of 1280 by 800 and 360 by 740; the wide one is lower while it plays. */
export const WIDE: Size = { width: 918, height: 508 };
export const PLAYING: Size = { width: 918, height: 447 };
export const PHONE: Size = { width: 334, height: 408 };

export function cameraAt(place: Place, size: Size, extent = { tokens: TOKENS, layers: LAYERS }): Camera {
  const turned = size.width < 560;
  return { rect: frameOf(place, extent, turned), size, turned };
}
