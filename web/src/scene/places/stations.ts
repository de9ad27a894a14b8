/** Which place of the picture each stage is, and which stage a place is of. A link names the place by `depth`, `block`, `product`, `row` beside the stage. */

import type { Data } from "../data/data";
import type { Block, Depth, Place, Product } from "./place";
import { blockOf } from "./sheet";

type Named = Readonly<Record<string, string>>;

const BLOCKS: Readonly<Record<string, Block>> = {
  tokens: "text", embedding: "row", norm: "norm", qkv: "qkv", rope: "rope", attention: "attention", heads: "heads", mlp: "mlp", sampler: "logits",
};

const PRODUCTS: readonly Product[] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head", "embed_tokens"];

/** Where a stage stands, unless its link says more. */
const DEPTHS: Readonly<Record<string, Depth>> = { residual: 1, bits: 3, ...Object.fromEntries(Object.keys(BLOCKS).map((stage) => [stage, 2])) };

/** What a table has by a name that a link may have given: `constructor` is none. */
const own = <T>(table: Readonly<Record<string, T>>, name: string): T | undefined => (Object.hasOwn(table, name) ? table[name] : undefined);

/** The place that a view's link names. */
export function placeOf(stage: string, fields: Named, at: Pick<Place, "pos" | "layer" | "head">): Place {
  const { pos, layer, head } = at;
  const said = Number(fields["depth"]);
  const half = stage === "norm" ? fields["half"] : undefined; // the final norm stands at the top of the whole
  const depth = (fields["depth"] && said >= 0 && said <= 4 && Number.isInteger(said) ? said : half === "final" ? 0 : (own(DEPTHS, stage) ?? 0)) as Depth;
  const product = PRODUCTS.find((one) => one === fields["product"]) ?? PRODUCTS.find((one) => one === fields["linear"]) ?? (stage === "bits" ? "up_proj" : undefined);
  const block = [...Object.values(BLOCKS), "mlp_norm" as const].find((one) => one === fields["block"]) ?? (half === "mlp" ? "mlp_norm" : own(BLOCKS, stage)) ?? (product && depth > 2 ? blockOf(product) : undefined);
  const row = /^\d{1,6}$/.test(fields["row"] ?? "") ? Number(fields["row"]) : undefined;
  if (depth < 2 || !block) return { depth: depth < 2 ? depth : 1, pos, layer, head };
  if (depth === 2) return { depth, pos, layer, head, block };
  if (!product || blockOf(product) !== block) return { depth: 2, pos, layer, head, block };
  return { depth, pos, layer, head, block, product, row: row ?? 0 };
}

/** The place in this model and text: a link's row may be of a larger one, and of the table the token's own row is taken. */
export function fitted(place: Place, { shape: { N, K, H, D, F, V }, tokens }: Pick<Data, "shape" | "tokens">): Place {
  const { product, row, pos } = place;
  if (!product || row === undefined) return place;
  if (product === "embed_tokens") return { ...place, row: tokens[pos]?.id ?? 0 };
  const rows = { q_proj: N * H, k_proj: K * H, v_proj: K * H, o_proj: D, gate_proj: F, up_proj: F, down_proj: D, lm_head: V };
  return { ...place, row: Math.min(row, rows[product] - 1) };
}

/** The stage that a place is of, the open one where it is of several; and what its link says more than the stage. */
export function stageOf(place: Place, open: string): { stage: string; fields: Named } {
  const stage = stageAt(place, open);
  const fields: Record<string, string> = {};
  if (place.depth !== (own(DEPTHS, stage) ?? 0)) fields["depth"] = String(place.depth);
  if (stage === "norm") fields["half"] = place.block === "mlp_norm" ? "mlp" : "";
  else if (place.depth >= 2 && place.block && place.block !== own(BLOCKS, stage) && place.depth !== 3) fields["block"] = place.block;
  if (place.depth >= 3) {
    fields["product"] = place.product ?? "";
    fields["row"] = String(place.row ?? 0);
  }
  return { stage, fields };
}

function stageAt({ depth, block }: Place, open: string): string {
  if (depth === 0) return (own(DEPTHS, open) ?? 0) === 0 ? open : "map";
  if (depth === 1) return open === "residual" ? open : "residual";
  if (block === "mlp_norm") return "norm";
  return Object.keys(BLOCKS).find((stage) => BLOCKS[stage] === block) ?? open;
}

/** The way from the whole to a place, for the breadcrumb. */
export function wayTo(place: Place): Place[] {
  const { pos, layer, head, block, product } = place;
  const isInLayer = block !== "text" && block !== "row" && block !== "logits";
  const way: Place[] = [{ depth: 0, pos, layer, head }];
  if (place.depth >= 1 && isInLayer) way.push({ depth: 1, pos, layer, head });
  if (place.depth >= 2 && block) way.push({ depth: 2, pos, layer, head, block });
  if (place.depth >= 3 && block && product) way.push({ depth: 3, pos, layer, head, block, product, row: place.row ?? 0 });
  if (place.depth === 4) way.push(place);
  return way;
}

const BLOCK_NAMES: Readonly<Record<Block, string>> = {
  text: "text", row: "row of the table", norm: "norm", qkv: "q, k, v", rope: "RoPE", attention: "attention", heads: "heads", mlp_norm: "norm of the MLP", mlp: "MLP", logits: "next token",
};

export function titleOf(place: Place): string {
  if (place.depth === 0) return "whole";
  if (place.depth === 1) return `layer ${place.layer}`;
  if (place.depth === 2) return BLOCK_NAMES[place.block ?? "attention"];
  return place.depth === 3 ? (place.product ?? "product") : `row ${place.row ?? 0}`;
}

export const samePlace = (a: Place, b: Place): boolean =>
  a.depth === b.depth && (a.depth === 0 || a.layer === b.layer || a.block === "text" || a.block === "row" || a.block === "logits") &&
  (a.depth < 2 || (a.pos === b.pos && a.block === b.block && a.head === b.head)) && (a.depth < 3 || (a.product === b.product && (a.depth < 4 || a.row === b.row)));
