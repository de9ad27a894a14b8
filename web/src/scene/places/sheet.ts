/**
 * A block of one token as a sheet that fills the picture: u runs from its left to its right edge, v from its lower to its upper one, both from 0
 * to 1. A sheet is upright also where the picture is turned. What lies within a sheet can be a sheet again: a matrix in a block, a number in that.
 */

import type { Point, Rect } from "../marks/marks";
import type { Block, Product } from "./place";

export interface Part {
  readonly u0: number;
  readonly v0: number;
  readonly u1: number;
  readonly v1: number;
}

export const WHOLE_SHEET: Part = { u0: 0, v0: 0, u1: 1, v1: 1 };

/** Where a number stands on the sheet of its product. */
export const NUMBER: Part = { u0: 0.5, v0: 0.02, u1: 1, v1: 0.24 };

/** Which block a product belongs to, and where its matrix stands there. */
const MATRICES: Readonly<Record<Product, { readonly block: Block; readonly part: Part }>> = {
  q_proj: { block: "qkv", part: { u0: 0.02, v0: 0.2, u1: 0.5, v1: 0.33 } },
  k_proj: { block: "qkv", part: { u0: 0.54, v0: 0.2, u1: 0.74, v1: 0.33 } },
  v_proj: { block: "qkv", part: { u0: 0.78, v0: 0.2, u1: 0.98, v1: 0.33 } },
  o_proj: { block: "heads", part: { u0: 0.3, v0: 0.18, u1: 0.7, v1: 0.28 } },
  gate_proj: { block: "mlp", part: { u0: 0.02, v0: 0.14, u1: 0.47, v1: 0.23 } },
  up_proj: { block: "mlp", part: { u0: 0.53, v0: 0.14, u1: 0.98, v1: 0.23 } },
  down_proj: { block: "mlp", part: { u0: 0.3, v0: 0.78, u1: 0.7, v1: 0.87 } },
  lm_head: { block: "logits", part: { u0: 0.3, v0: 0.2, u1: 0.7, v1: 0.31 } },
  embed_tokens: { block: "row", part: { u0: 0.3, v0: 0.3, u1: 0.7, v1: 0.66 } },
};

export const blockOf = (product: Product): Block => MATRICES[product].block;

export const productPart = (product: Product): Part => MATRICES[product].part;

/** The point of the world at a place of the sheet that fills a rectangle. */
export function atOf({ x0, y0, x1, y1 }: Rect, turned: boolean, u: number, v: number): Point {
  return turned ? [x0 + (1 - v) * (x1 - x0), y0 + u * (y1 - y0)] : [x0 + u * (x1 - x0), y0 + v * (y1 - y0)];
}

export function partOf(rect: Rect, turned: boolean, { u0, v0, u1, v1 }: Part): Rect {
  const [a, b] = [atOf(rect, turned, u0, v0), atOf(rect, turned, u1, v1)];
  return { x0: Math.min(a[0], b[0]), y0: Math.min(a[1], b[1]), x1: Math.max(a[0], b[0]), y1: Math.max(a[1], b[1]) };
}
