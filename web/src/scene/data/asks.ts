/** What each depth asks of the server; the answers as the scenes take them. */

import { length } from "../../lib/algebra";
import { api } from "../../lib/api";
import { find } from "../../lib/modules";
import { sampling } from "../../lib/sampling.svelte";
import { around } from "../../lib/window";
import { pathOf, type LinearName } from "../../lib/weights";
import type { ModelView, PassView, PieceView, TokensView } from "../../schema";
import type { BlockNumbers, LayerNumbers, ProductNumbers } from "./near";
import type { Block, Place, Product } from "../places/place";
import { termsOf } from "../depths/number";

export const MOST_TOKENS = 72; // of a layer
const NEURONS = 10;
const CANDIDATES = 10;
const SAMPLED = 50; // candidates of each step of the sampler
const ROWS = 16; // of a matrix
const CODES = 16;
const TABLE = "model.embed_tokens";
const PLAIN = ["F32", "F16", "BF16"];

/** What each matrix is multiplied with and what comes out, by the names of a trace. */
const THROUGH: Readonly<Record<Exclude<Product, "embed_tokens">, readonly [input: string, output: string]>> = {
  q_proj: ["attn_norm", "q"], k_proj: ["attn_norm", "k"], v_proj: ["attn_norm", "v"], o_proj: ["head_out", "attn_out"],
  gate_proj: ["mlp_norm", "gate"], up_proj: ["mlp_norm", "up"], down_proj: ["gated", "mlp_out"], lm_head: ["final_norm", "logits"],
};

/** Of what a pass is asked. */
export interface Asker {
  readonly pass: PassView;
  readonly model: ModelView;
}

/** Lengths of vectors that lie one behind the other. */
function lengths(values: Float32Array, size: number): Float64Array {
  return Float64Array.from({ length: values.length / size }, (_, i) => length(values.subarray(i * size, (i + 1) * size)));
}

function roots(of: Float64Array, size: number, eps: number): Float64Array {
  return of.map((value) => Math.sqrt((value * value) / size + eps));
}

export async function askLayer({ pass, model }: Asker, { pos, layer }: Place): Promise<LayerNumbers> {
  const { D, H } = model.shape;
  const { start, stop } = around(pos, pass.tokens.length, MOST_TOKENS);
  const own = { start, stop };
  const ask = async (name: string, of: object): Promise<Float32Array> => (await api.activation(pass, name, of)).values;
  const streams = [
    layer === 0 ? ask("embed", own) : ask("resid", { layer: layer - 1, ...own }),
    ...["resid_mid", "resid", "attn_out", "mlp_out"].map((name) => ask(name, { layer, ...own })),
  ];
  const [found, q, k, v, pattern, rope] = await Promise.all([
    Promise.all(streams), ask("q", { layer, ...own }), ask("k", { layer }), ask("v", { layer }), ask("pattern", { layer, ...own }), api.get("rope"),
  ]);
  const [before, middle, after, attention, mlp] = found.map((values) => lengths(values, D)) as [Float64Array, Float64Array, Float64Array, Float64Array, Float64Array];
  const here = (values: Float32Array): Float32Array => Float32Array.from(lengths(values, H)).subarray(start * model.shape.K, stop * model.shape.K);
  return {
    layer, start, count: stop - start, before, middle, after, attention, mlp, pattern, sources: pass.tokens.length, queries: Float32Array.from(lengths(q, H)), keys: here(k), values: here(v),
    rms: roots(before, D, model.rms_norm_eps), middleRms: roots(middle, D, model.rms_norm_eps), frequency: rope.pairs[0]?.frequency ?? 0,
  };
}

/** The piece of a text that a token is of, and its bytes. */
export function pieceOf(told: TokensView, pos: number): { piece: PieceView; bytes: number[] } | undefined {
  let seen = told.tokens.length - told.pieces.reduce((sum, one) => sum + one.ids.length, 0); // control tokens stand before
  if (pos < seen) return undefined;
  const piece = told.pieces.find((one) => (seen += one.ids.length) > pos);
  return piece && { piece, bytes: told.utf8.slice(piece.start, piece.start + new TextEncoder().encode(piece.text).length) };
}

/** The text that a pass is of, where it was named by one. */
export interface Named {
  readonly text: string;
  readonly bos: boolean;
  readonly isByIds: boolean;
}

export async function askBlock(asker: Asker, { pos, layer, head }: Place, block: Block, named: Named): Promise<BlockNumbers> {
  const { pass, model } = asker;
  const { H, K, N } = model.shape;
  const at = { pos, layer };
  const here = async (name: string, of: object = { layer }): Promise<Float32Array> => (await api.activation(pass, name, { ...of, position: pos })).values;
  const group = Math.floor((head * K) / N);
  const own = (values: Float32Array, of: number): Float32Array => values.subarray(of * H, (of + 1) * H);
  switch (block) {
    case "norm":
    case "mlp_norm": {
      const isFirst = block === "norm";
      const stream = !isFirst ? here("resid_mid") : layer === 0 ? here("embed", {}) : here("resid", { layer: layer - 1 });
      const key = `model.layers.${layer}.${isFirst ? "input_layernorm" : "post_attention_layernorm"}.weight`;
      const [before, gamma, after] = await Promise.all([stream, api.get("weights", { key }), here(isFirst ? "attn_norm" : "mlp_norm")]);
      return { ...at, block, before, gamma: gamma.values, after, eps: model.rms_norm_eps };
    }
    case "qkv": {
      const [input, q, k, v] = await Promise.all([here("attn_norm"), here("q"), here("k"), here("v")]);
      return { ...at, block, input, q, k, v };
    }
    case "rope": {
      const [q, qTurned, k, kTurned, told] = await Promise.all([here("q"), here("q_rot"), here("k"), here("k_rot"), api.get("rope")]);
      return { ...at, block, head, frequencies: told.pairs.map((one) => one.frequency), q: own(q, head), qTurned: own(qTurned, head), k: own(k, group), kTurned: own(kTurned, group) };
    }
    case "attention": {
      const [scores, pattern, values, out] = await Promise.all([
        here("scores", { layer, head }), here("pattern", { layer, head }), api.activation(pass, "v", { layer, head: group }), here("head_out", { layer, head }),
      ]);
      return { ...at, block, head, scores, pattern, values: values.values, out };
    }
    case "heads": {
      const [told, added, gathered, out] = await Promise.all([
        api.of(pass, "heads", { layer, position: pos }), api.of(pass, "heads/added", { layer, position: pos }), here("head_out"), here("attn_out"),
      ]);
      return { ...at, block, gathered, added: added.values, norms: told.norms, shares: told.shares, out, rounding: told.rounding };
    }
    case "mlp": {
      const asked = { layer, position: pos, k: Math.min(NEURONS, model.shape.F), stride: pass.tokens.length };
      const [input, gate, act, up, gated, out, told] = await Promise.all([
        here("mlp_norm"), here("gate"), here("act"), here("up"), here("gated"), here("mlp_out"), api.of(pass, "neurons", asked),
      ]);
      return { ...at, block, input, gate, act, up, gated, out, neurons: told.neurons };
    }
    case "text": {
      const token = pass.tokens[pos];
      const told = named.isByIds ? undefined : await api.send("tokens", { text: named.text, add_special_tokens: named.bos, tokenizer: "model" });
      const of = told?.tokens.length === pass.tokens.length ? pieceOf(told, pos) : undefined;
      return { ...at, block, id: token?.id ?? 0, text: token?.text ?? "", bytes: of?.bytes ?? token?.bytes ?? [], piece: of?.piece };
    }
    case "row": {
      const token = pass.tokens[pos];
      return { ...at, block, id: token?.id ?? 0, text: token?.text ?? "", row: await here("embed", {}) };
    }
    case "logits": {
      const params = { ...sampling.params };
      const [input, next, sampled] = await Promise.all([
        here("final_norm", {}), api.of(pass, "next", { position: pos, k: CANDIDATES }), api.post(pass, "sampler", { ...params, position: pos, k: Math.min(SAMPLED, model.shape.V) }),
      ]);
      return { ...at, block, input, candidates: next.candidates, sampled, temperature: params.temperature };
    }
  }
}

export async function askProduct(asker: Asker, place: Place, product: Product): Promise<ProductNumbers> {
  const { pass, model } = asker;
  const { pos, layer, head } = place;
  const at = { product, pos, layer, head };
  if (product === "embed_tokens") {
    const row = pass.tokens[pos]?.id ?? 0; // the row that is taken, and none beside it
    const { start, stop } = around(row, model.shape.V, ROWS);
    const rows = await api.rows(Array.from({ length: stop - start }, (_, i) => start + i));
    return { ...at, row, first: start, weights: rows.values, columns: model.shape.D, of: model.shape.V, output: new Float32Array(stop - start), isRounded: false, type: find(model.tree, TABLE)?.type ?? undefined };
  }
  const [from, to] = THROUGH[product];
  const isHead = product === "lm_head";
  const of = isHead ? { position: pos } : { layer, position: pos };
  const leaf = find(model.tree, isHead ? (model.tied ? TABLE : "lm_head") : pathOf(layer, product as LinearName));
  const total = isHead ? model.shape.V : (leaf?.shape[0] ?? 0);
  const row = Math.max(0, Math.min(place.row ?? 0, total - 1));
  const { start, stop } = around(row, total, ROWS);
  const isPacked = !isHead && !!leaf?.type && !PLAIN.includes(leaf.type);
  const [matrix, input, output] = await Promise.all([
    api.of(pass, "matrix", { linear: product, ...(isHead ? {} : { layer }), start, count: stop - start }), api.activation(pass, from, of), api.activation(pass, to, of),
  ]);
  const found: ProductNumbers = {
    ...at, row, first: start, weights: matrix.values, columns: matrix.shape[1] ?? 0, of: total, input: input.values, output: output.values.subarray(start, stop), isRounded: false, type: leaf?.type ?? undefined,
  };
  return isPacked ? { ...found, ...(await packed(asker, found, product as LinearName)) } : found;
}

/** The codes where the row's largest term is, and whether the pass rounded what they are multiplied with. */
async function packed({ pass }: Asker, found: ProductNumbers, linear: LinearName): Promise<Pick<ProductNumbers, "codes" | "isRounded">> {
  const { layer, row, columns, pos } = found;
  const start = Math.floor((termsOf(found).terms[0]?.index ?? 0) / CODES) * CODES;
  const [codes, inputs] = await Promise.all([
    api.get("codes", { layer, linear, row, start, count: Math.min(CODES, columns - start) }), api.of(pass, "inputs", { layer, linear, position: pos, start, count: 1 }),
  ]);
  return { codes, isRounded: inputs.is_rounded };
}
