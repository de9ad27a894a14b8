/** Where the rows of a card stand: a token a row, its name at the left. */
import { visible } from "../lib/format";
import { clipped } from "../lib/telling";

export interface RowsOf {
  readonly width: number;
  readonly height: number;
  /** Height of a row. */
  readonly row: number;
  /** Where the names end and the drawing begins. */
  readonly left: number;
  /** The middle of a row. */
  readonly y: (i: number) => number;
  readonly name: (text: string) => string;
}

/** Pictures below this width are drawn for a phone. */
export const NARROW = 480;

const [LETTER, SIDE] = [8.7, 12] as const; // px of a letter of the names, and between a name and the drawing

export function rowsOf(count: number, width: number, top = 0, bottom = 0): RowsOf {
  const isNarrow = width < NARROW;
  const row = count > 9 ? (isNarrow ? 23 : 30) : count > 7 ? (isNarrow ? 28 : 36) : isNarrow ? 33 : 44;
  const left = Math.min(150, Math.round(width * 0.32));
  const most = Math.floor((left - SIDE) / LETTER);
  return { width, height: top + row * count + bottom, row, left, y: (i) => top + row * (i + 0.5), name: (text) => clipped(visible(text), most) };
}
