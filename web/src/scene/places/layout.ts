/** Where everything stands in the world, and which part of it a place shows. */

import type { Point, Rect } from "../marks/marks";
import type { Block, Place } from "./place";
import { NUMBER, partOf, productPart } from "./sheet";

export interface Extent {
  readonly tokens: number;
  readonly layers: number;
}

/** Below the layers stand the text, its ids and their rows; above them the final norm, the head, and the bars of the next token. */
export const footOf = (layers: number): number => Math.max(2.4, 0.1 * layers);
export const topOf = (layers: number): number => Math.max(3, 0.19 * layers);

/** Of a layer's height, from below: where its steps are. What the far view draws at a height, the near view draws there too. */
export const STEPS = {
  norm: [0.02, 0.1],
  qkv: [0.12, 0.22],
  rope: [0.23, 0.31],
  attention: [0.32, 0.42],
  heads: [0.43, 0.51],
  mlp_norm: [0.54, 0.62],
  mlp: [0.64, 0.94],
} as const satisfies Partial<Record<Block, readonly [number, number]>>;

/** Heights of the two sums, where attention and the MLP enter the stream. */
export const SUM_OF_ATTENTION = 0.52;
export const SUM_OF_MLP = 0.96;

/** Around a block that fills the picture, as a share of it on each side. */
export const MARGIN = 0.04;

/** Columns that are seen at once: of a picture that is turned, and of a layer. */
const TURNED = 5.6;
const MOST_TURNED = 9.2;
const MOST_IN_LAYER = 40;

const COLUMN = 0.46; // half of a block's width, around its token

/** The part of the world that holds a block of one token. */
export function blockRect(block: Block, pos: number, layer: number, { layers }: Extent): Rect {
  const columns = { x0: pos - COLUMN, x1: pos + COLUMN };
  const foot = footOf(layers);
  if (block === "text") return { ...columns, y0: -foot, y1: -foot / 2 };
  if (block === "row") return { ...columns, y0: -foot / 2, y1: 0 };
  if (block === "logits") return { ...columns, y0: layers, y1: layers + topOf(layers) };
  const [from, to] = STEPS[block];
  return { ...columns, y0: layer + from, y1: layer + to };
}

/** The rectangle of a place from depth 2: a block, the matrix of a product in it, a number in that. */
export function rectOf({ depth, pos, layer, block = "attention", product }: Place, extent: Extent, turned = false): Rect {
  const around = blockRect(block, pos, layer, extent);
  if (depth < 3 || !product) return around;
  const matrix = partOf(around, turned, productPart(product));
  return depth < 4 ? matrix : partOf(matrix, turned, NUMBER);
}

/** The part of the world that a place shows. */
export function frameOf(place: Place, extent: Extent, turned = false): Rect {
  const { tokens, layers } = extent;
  if (place.depth === 0) {
    const [low, high] = turned ? [2.6 * footOf(layers), 0.03 * layers] : [footOf(layers), topOf(layers)];
    return { ...columnsAround(place.pos, tokens, turned ? TURNED : Infinity, turned ? NUMBERS : NAMES), y0: -low, y1: layers + high };
  }
  if (place.depth === 1) return { ...columnsAround(place.pos, tokens, turned ? MOST_TURNED : MOST_IN_LAYER, turned ? NUMBERS : NAMES), y0: place.layer - 0.08, y1: place.layer + 1.08 };
  return grown(rectOf(place, extent, turned), MARGIN);
}

/** At the left stand the numbers of the layers, or the names of a layer's steps: so much of the width. */
const [NUMBERS, NAMES] = [0.036, 0.075] as const;

/** So many columns at most, those around a token; at the right one is free: the next token. */
function columnsAround(pos: number, tokens: number, most: number, room: number): { x0: number; x1: number } {
  const edge = room * Math.min(tokens, most);
  const [first, last] = [-0.5 - Math.max(0.4, edge), tokens - 0.5 + Math.max(1.4, edge)]; // at the right also the lens's words of the last token
  if (last - first <= most) return { x0: first, x1: last };
  const x0 = Math.min(last - most, Math.max(first, pos - most / 2));
  return { x0, x1: x0 + most };
}

function grown(rect: Rect, by: number): Rect {
  const [dx, dy] = [by * (rect.x1 - rect.x0), by * (rect.y1 - rect.y0)];
  return { x0: rect.x0 - dx, y0: rect.y0 - dy, x1: rect.x1 + dx, y1: rect.y1 + dy };
}

/** A point within a rectangle, by shares of its width and height, from the lower left. */
export function within(rect: Rect, [x, y]: Point): Point {
  return [rect.x0 + x * (rect.x1 - rect.x0), rect.y0 + y * (rect.y1 - rect.y0)];
}
