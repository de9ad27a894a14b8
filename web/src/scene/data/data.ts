/** What the scenes are drawn from. Everything in it came from the server; what has not come yet is missing, and is not drawn. */

import type { Band } from "../../lib/telling";
import type { Extent } from "../places/layout";
import type { Near } from "./near";

/** A pass, far away: numbers for each column and layer. A column is a token; of a long text every so many tokens are one, with those before it that are none. */
export interface Far {
  /** The first column's token, and the distance to the next one's. */
  readonly start: number;
  readonly block: number;
  /** Whether a column's numbers are the means of its tokens, and its shares the largest among them; else they are its last token's. */
  readonly isMean?: boolean;
  /** Whether tokens look ahead: every row of attention has all columns. */
  readonly isWhole?: boolean;
  readonly columns: number;
  /** Rows of numbers: the model's layers, or the bands into which they are folded. */
  readonly layers: number;
  readonly bands?: readonly Band[];
  /** Length of the residual stream, (L + 1) by columns: the row of the table, then after each layer. */
  readonly lengths: Float32Array;
  /** Mean over a layer's heads of the share that a column's token takes from each column's tokens up to itself: by layer and column, `pairOf` tells the place. */
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
  /** Whether the far picture shows its layers folded into a few bands. */
  readonly isFolded?: boolean;
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
  const first = columnsBefore(far);
  if (far.isWhole) return (layer * far.columns + query) * (first + far.columns) + key;
  const row = (c: number): number => (c * (c + 1)) / 2 + c * first;
  return layer * row(far.columns) + row(query) + key;
}

/** A window's rows of attention begin with the columns before it. */
export const columnsBefore = ({ start, block }: Pick<Far, "start" | "block">): number => Math.floor(start / block);

/** The token whose numbers a column shows, and the column of a token. */
export const tokenOf = (far: Far, column: number): number => far.start + column * far.block;
export const columnOf = (far: Far, pos: number): number => Math.ceil((pos - far.start) / far.block);

/** The column that is this token alone; none where columns are of several, or where it is outside of the window. */
export function columnAlone(far: Far | undefined, pos: number): number | undefined {
  const column = pos - (far?.start ?? 0);
  return far?.block === 1 && column >= 0 && column < far.columns ? column : undefined;
}

/** The first token of a column. */
export const beginOf = (far: Far, column: number): number => Math.max(0, tokenOf(far, column) - far.block + 1);

/** The middle of a column in the world. */
export const middleOf = (far: Far, column: number): number => tokenOf(far, column) - (far.block - 1) / 2;
