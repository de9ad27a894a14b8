/** What the blocks' scenes share. */

import { length } from "../../lib/algebra";
import { number, visible } from "../../lib/format";
import type { Data } from "../data/data";
import type { Place, Product } from "../places/place";
import { blockOf } from "../places/sheet";

export interface Here {
  readonly pos: number;
  readonly layer: number;
}

/** The place of a product, or of one number of it. */
export function productPlace(product: Product, { pos, layer }: Here, data: Data, row?: number): Place {
  const place = { pos, layer, head: data.chosen.head, block: blockOf(product), product };
  return row === undefined ? { ...place, depth: 3, row: 0 } : { ...place, depth: 4, row };
}

export const tokenAt = (data: Data, pos: number): string => `“${visible(data.tokens[pos]?.text ?? "")}”`;

export const lengthText = (values: Float32Array): string => `length ${number(length(values), 3)}`;

/** What a vector's length is, as a mark says it. */
export const lengthOf = (name: string, values: Float32Array): { name: string; value: number; unit: string } => ({ name, value: length(values), unit: "length" });

const kept = new WeakMap<object, Map<string, Float32Array>>();

/** Numbers that follow from others, made once: while a block is computed, the same ones are painted in each frame. */
export function once(of: object, name: string, make: () => Float32Array): Float32Array {
  const all = kept.get(of) ?? new Map<string, Float32Array>();
  kept.set(of, all);
  const found = all.get(name) ?? make();
  all.set(name, found);
  return found;
}

/** A row of a matrix (rows, size). */
export const rowOf = (values: Float32Array, row: number, size: number): Float32Array => once(values, `${row} ${size}`, () => values.subarray(row * size, (row + 1) * size));
