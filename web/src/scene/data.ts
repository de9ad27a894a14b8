/** What the scenes are drawn from. Everything in it came from the server; what has not come yet is missing, and is not drawn. */

import type { Extent } from "./layout";
import type { Near } from "./near";

/** A pass, far away: numbers for each column and layer. A column is a token, or a block of them where a text is long. */
export interface Far {
  /** The first token, and how many a column holds. */
  readonly start: number;
  readonly block: number;
  readonly columns: number;
  readonly layers: number;
  /** Length of the residual stream, (L + 1) by columns: the row of the table, then after each layer. Of a block the mean, as all below. */
  readonly lengths: Float32Array;
  /** Mean over a layer's heads of the share that a column takes from each column up to itself: by layer and column, `pairOf` tells the place. */
  readonly attention: Float32Array;
  /** Length of what attention added, as a share of the stream's after it; (L, columns), as all below. */
  readonly attentionAdded: Float32Array;
  readonly mlpAdded: Float32Array;
  /** Length of a key and of a value, mean over the groups. */
  readonly keys: Float32Array;
  readonly values: Float32Array;
}

/** The lens: what the stream would say after each layer. A column that has not come yet has probability NaN. */
export interface Said {
  /** By layer and column. */
  readonly words: readonly (string | undefined)[];
  readonly probabilities: Float32Array;
}

/** Tokens that may come next, the best first. */
export interface Next {
  readonly candidates: readonly { readonly id: number; readonly text: string; readonly probability: number }[];
}

export interface Shape {
  readonly N: number;
  readonly K: number;
  readonly H: number;
  readonly D: number;
  readonly F: number;
  readonly V: number;
}

export interface Data {
  readonly extent: Extent;
  readonly shape: Shape;
  readonly tokens: readonly { readonly id: number; readonly text: string }[];
  /** What is looked at: its column, layer and head are marked. */
  readonly chosen: { readonly pos: number; readonly layer: number; readonly head: number };
  readonly far?: Far | undefined;
  readonly said?: Said | undefined;
  readonly next?: Next | undefined;
  /** What the entered depths are drawn from. */
  readonly near?: Near | undefined;
}

/** How far the pass has come. At rest everything is there. */
export interface Moment {
  /** Columns from this one on are on their way; those before stand. */
  readonly from: number;
  /** The height up to which they have come. */
  readonly height: number;
  /** How much of an entered block has been computed, from 0 to 1. */
  readonly share: number;
}

export const REST: Moment = { from: Infinity, height: Infinity, share: 1 };

/** Where the share that a column takes from another stands in `Far.attention`; keys are columns up to the query's own. */
export function pairOf(far: Far, layer: number, query: number, key: number): number {
  const first = Math.round(far.start / far.block); // a window's rows begin with the columns before it
  const row = (c: number): number => (c * (c + 1)) / 2 + c * first;
  return layer * row(far.columns) + row(query) + key;
}

/** The middle of a column in the world. */
export const middleOf = (far: Far, column: number): number => far.start + (column + 0.5) * far.block - 0.5;
