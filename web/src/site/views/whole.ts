/** The model as a whole, its weights, RoPE, and a pass seen from far. As `page/probes/model.py` and `inspect/probes`. */
import type { ModelConfig } from "../../engine/types";
import type { RopeAngles, ScoresByDistance, TokenCost } from "../../schema";
import { json, numbers, Refused, type Answer, type Fields } from "../asked";
import type { Pass, Passes } from "../passes";
import { windowOf } from "../select";
import { dot, lengthOf, range, row } from "../tensor";
import { describe, kvBytes } from "./model";

const MOST_DISTANCES = 4096;
const MOST_BLOCK_TOKENS = 2048; // of a picture in blocks: each of them looks at each
const LINEARS = { q_proj: "self_attn", k_proj: "self_attn", v_proj: "self_attn", o_proj: "self_attn", gate_proj: "mlp", up_proj: "mlp", down_proj: "mlp" } as const;

/** A weight that is a vector: a norm's. */
export function weightOf({ model }: Passes, query: Fields): Answer {
  const key = query.text("key");
  if (!key.endsWith("norm.weight") || !model.config.weights[key]) {
    throw new Refused(404, "no vector of weights has this key; there are model.norm.weight and the like", "unknown_weight", "key");
  }
  return numbers({ values: model.rows(key), shape: [model.config.hidden], axes: "D" });
}

/** Some rows of a matrix: (count, columns). */
export function matrixOf({ model }: Passes, query: Fields): Answer {
  const linear = query.text("linear");
  const layer = query.maybe("layer", { below: model.config.layers }) ?? 0;
  const name = linear === "lm_head" ? "lm_head.weight" : `model.layers.${layer}.${LINEARS[linear as keyof typeof LINEARS]}.${linear}.weight`;
  const shape = model.config.weights[name]?.shape;
  const [height, width] = shape ?? [0, 0];
  if (!height || !width) throw new Refused(404, "the model has no matrix of this name", "unknown_weight", "linear");
  const start = query.whole("start", 0, { below: height });
  const count = query.whole("count", 1, { least: 1, below: height - start + 1 });
  return numbers({ values: model.rows(name, range(start, start + count)), shape: [count, width], axes: "RI" });
}

/** The frequency of a pair without scaling. */
const unscaled = ({ ropeTheta, headDim }: ModelConfig, pair: number): number => Math.fround(ropeTheta ** ((-2 * pair) / headDim));

/** Whether the frequencies are others than without scaling, by more than rounding. */
const isScaledIn = (config: ModelConfig): boolean => config.frequencies.some((frequency, i) => Math.abs(frequency / unscaled(config, i) - 1) > 1e-5);

/** What the model is, and what runs it here. */
export const modelOf = ({ model }: Passes, hasLesson: boolean): Answer => json(describe(model, isScaledIn(model.config), hasLesson));

export function ropeOf({ config }: Passes, query: Fields): Answer {
  const position = query.whole("position", 0, { below: config.maxContext });
  const isScaled = isScaledIn(config);
  const pairs = Array.from(config.frequencies, (frequency, index) => ({
    index, frequency, unscaled: isScaled ? unscaled(config, index) : frequency, wavelength: (2 * Math.PI) / frequency,
    angle: Math.fround(frequency * position), turns: (config.maxContext * frequency) / (2 * Math.PI),
  }));
  return json({ position, context: config.maxContext, is_scaled: isScaled, pairs } satisfies RopeAngles);
}

/** Operations of the text's last token, with the KV cache and without it. As `llamarium/cost.py`. */
export function costOf({ config }: Passes, { ids }: Pass): Answer {
  const { hidden, heads, kvHeads, headDim, intermediate, layers, vocab, window } = config;
  const weights = layers * hidden * (headDim * (2 * heads + 2 * kvHeads) + 3 * intermediate);
  const pairs = (tokens: number): number => {
    const reach = Math.min(window ?? tokens, tokens);
    return (reach * (reach + 1)) / 2 + (tokens - reach) * reach;
  };
  const flops = (fresh: number, cached: number): number =>
    2 * fresh * weights + 2 * vocab * hidden + 4 * (pairs(cached + fresh) - pairs(cached)) * layers * heads * headDim;
  return json({
    num_tokens: ids.length, flops: flops(1, ids.length - 1), flops_without: flops(ids.length, 0), cache_bytes_per_token: kvBytes(config), largest_difference: 0,
  } satisfies TokenCost);
}

/** The score of a token's query and a token's key at each distance. */
export function distancesOf(passes: Passes, pass: Pass, query: Fields): Answer {
  const { layers, heads, kvHeads, headDim, frequencies, attentionFactor, maxContext } = passes.config;
  const layer = query.whole("layer", undefined, { below: layers });
  const head = query.whole("head", undefined, { below: heads });
  const position = query.whole("position", pass.ids.length - 1, { below: pass.ids.length });
  const key = query.whole("key", 0, { below: pass.ids.length });
  const distances = range(0, query.whole("stop", 128, { least: 1, below: maxContext + 1 }), query.whole("stride", 1, { least: 1 }));
  if (distances.length > MOST_DISTANCES) throw new Refused(400, `these are ${distances.length} distances; at most ${MOST_DISTANCES} are returned: use a larger stride`, "too_many_numbers", "stride");
  const q = row(passes.at(pass, "q", layer, [position]).values, head, headDim);
  const k = row(passes.tapped(pass, "k", layer), key * kvHeads + Math.floor(head / (heads / kvHeads)), headDim);
  const half = headDim / 2;
  const scores = distances.map((distance) => {
    const turned = new Float32Array(headDim);
    for (let i = 0; i < half; i++) {
      const angle = Math.fround(distance * (frequencies[i] as number));
      const [cos, sin] = [Math.fround(Math.cos(angle) * attentionFactor), Math.fround(Math.sin(angle) * attentionFactor)];
      const [a, b] = [q[i] as number, q[i + half] as number];
      turned[i] = Math.fround(a * cos) - Math.fround(b * sin);
      turned[i + half] = Math.fround(b * cos) + Math.fround(a * sin);
    }
    return Math.fround(dot(turned, k) * headDim ** -0.5);
  });
  return json({ distances, scores } satisfies ScoresByDistance);
}

/** A pass seen from far: some numbers for each column and layer. `inspect/probes/picture.py` has the table of its parts. */
export function pictureOf(passes: Passes, pass: Pass, query: Fields): Answer {
  const { start, stride, rows: columns } = windowOf(query, pass.ids.length);
  const inBlocks = query.bool("blocks", false);
  const last = columns.at(-1) as number;
  if (inBlocks && last >= MOST_BLOCK_TOKENS) throw new Refused(400, `${last + 1} tokens; ${MOST_BLOCK_TOKENS} at most are shown in blocks: give stride alone`, "invalid_parameter", "blocks");
  const layers = range(0, passes.config.layers);
  /** The tokens of a column: its own, and in blocks those behind the column before. */
  const tokensOf = (column: number): number[] => (inBlocks ? range(Math.max(0, column - stride + 1), column + 1) : [column]);
  const mean = (of: (token: number) => number) => (column: number): number => {
    const tokens = tokensOf(column);
    return tokens.reduce((sum, token) => sum + of(token), 0) / tokens.length;
  };
  const lengths = (name: "embed" | "resid" | "resid_mid" | "attn_out" | "mlp_out", layer?: number): ((token: number) => number) => {
    const values = passes.tapped(pass, name, layer);
    return (token) => Math.fround(lengthOf(row(values, token, passes.config.hidden)));
  };
  const ratio = (part: "attn_out" | "mlp_out", whole: "resid_mid" | "resid") => (layer: number): number[] => {
    const [a, b] = [lengths(part, layer), lengths(whole, layer)];
    return columns.map(mean((token) => a(token) / b(token)));
  };
  const parts = [
    columns.map(mean(lengths("embed"))), ...layers.map((layer) => columns.map(mean(lengths("resid", layer)))),
    ...layers.map(ratio("attn_out", "resid_mid")), ...layers.map(ratio("mlp_out", "resid")),
    ...layers.map((layer) => columns.map(mean(cached(passes, pass, "k", layer)))),
    ...layers.map((layer) => columns.map(mean(cached(passes, pass, "v", layer)))),
    ...layers.map((layer) => sharesOf(passes, pass, layer, columns.map(tokensOf), start % stride, stride)),
  ];
  const values = Float32Array.from(parts.flat());
  return numbers({ values, shape: [values.length], axes: "P" });
}

/** The length of a token's key or value, mean over the key-value heads. */
function cached(passes: Passes, pass: Pass, name: "k" | "v", layer: number): (token: number) => number {
  const { kvHeads, headDim } = passes.config;
  const values = passes.tapped(pass, name, layer);
  return (token) => range(0, kvHeads).reduce((sum, head) => sum + lengthOf(row(values, token * kvHeads + head, headDim)), 0) / kvHeads;
}

/** The share that each column takes of each column up to its own, mean over the heads: pairs, row by row. */
function sharesOf(passes: Passes, pass: Pass, layer: number, columns: readonly number[][], rest: number, stride: number): number[] {
  const { heads } = passes.config;
  return columns.flatMap((tokens) => {
    const { values } = passes.at(pass, "pattern", layer, tokens);
    const last = tokens.at(-1) as number;
    const ends = range(rest, last + 1, stride); // the last key of each column
    return ends.map((end, i) => Math.max(...tokens.map((_, t) => {
      let sum = 0;
      for (let head = 0; head < heads; head++) {
        for (let key = i === 0 ? 0 : (ends[i - 1] as number) + 1; key <= end; key++) sum += values[(head * tokens.length + t) * pass.ids.length + key] as number;
      }
      return sum / heads;
    })));
  });
}
