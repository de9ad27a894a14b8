/**
 * Where the tokens of a card stand, as in Follow's picture: from left to right with their names below, and layers upwards. On a phone the
 * picture is turned: tokens go down, layers to the right.
 */
import { visible } from "../lib/format";
import { clipped } from "../lib/telling";

/** Pictures below this width are drawn for a phone. */
export const NARROW = 480;

export const LETTER = 8.7; // px, of the names
const SIDE = 12; // px beside a name
const NAMES = 42; // px of the names below a picture
const WIDEST = 128; // px of a token

export interface Box {
  readonly x: number;
  readonly y: number;
  readonly width: number;
  readonly height: number;
}

export interface Axes {
  readonly width: number;
  readonly height: number;
  readonly isTurned: boolean;
  /** Pixels of a token. */
  readonly step: number;
  /** Pixels from the names to the far end. */
  readonly reach: number;
  /** `up` pixels from a token's name, `side` pixels past its middle in the order of the text. */
  readonly at: (i: number, up: number, side?: number) => readonly [x: number, y: number];
  /** What lies between two such points. */
  readonly box: (i: number, up: readonly [number, number], side: readonly [number, number]) => Box;
  /** Where a token's name stands, with a frame around it. */
  readonly frame: (i: number) => Box;
  readonly name: (text: string) => string;
}

/** Pixels that stay free: beyond the far end, before the first token, and after the last. */
export interface Margins {
  readonly far?: number;
  readonly before?: number;
  readonly after?: number;
}

/** The axes of a picture of so many tokens: `upright` and `turned` are its margins, and `reach` its height above the names if it is upright. */
export function axesOf(count: number, width: number, reach: number, upright: Margins = {}, turned: Margins = {}): Axes {
  return width < NARROW ? turnedAxes(count, width, turned) : uprightAxes(count, width, reach, upright);
}

function uprightAxes(count: number, width: number, reach: number, { far = 0, before = 0, after = 0 }: Margins): Axes {
  const step = Math.min(WIDEST, (width - before - after) / count);
  const foot = far + reach;
  const at: Axes["at"] = (i, up, side = 0) => [before + step * (i + 0.5) + side, foot - up];
  return {
    width, height: foot + NAMES, isTurned: false, step, reach, at,
    box: (i, up, side) => between(at(i, up[0], side[0]), at(i, up[1], side[1])),
    frame: (i) => ({ x: before + step * i + 2, y: foot + 6, width: step - 4, height: 29 }),
    name: (text) => clipped(visible(text), Math.floor((step - 8) / LETTER)),
  };
}

function turnedAxes(count: number, width: number, { far = 0, before = 0, after = 0 }: Margins): Axes {
  const rows = rowsOf(count, width, before, after);
  const at: Axes["at"] = (i, up, side = 0) => [rows.left + up, rows.y(i) + side];
  return {
    width, height: rows.height, isTurned: true, step: rows.row, reach: width - rows.left - far, at,
    box: (i, up, side) => between(at(i, up[0], side[0]), at(i, up[1], side[1])),
    frame: (i) => frameOf(rows, i),
    name: rows.name,
  };
}

function between([x0, y0]: readonly [number, number], [x1, y1]: readonly [number, number]): Box {
  return { x: Math.min(x0, x1), y: Math.min(y0, y1), width: Math.abs(x1 - x0), height: Math.abs(y1 - y0) };
}

/** Tokens from top to bottom at any width: those that ask, in a table of shares. */
export interface Rows {
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

export function rowsOf(count: number, width: number, top = 0, bottom = 0): Rows {
  const isNarrow = width < NARROW;
  const row = count > 9 ? (isNarrow ? 23 : 30) : count > 7 ? (isNarrow ? 28 : 36) : isNarrow ? 33 : 44;
  const left = Math.min(150, Math.round(width * 0.32));
  const most = Math.floor((left - SIDE) / LETTER);
  return { width, height: top + row * count + bottom, row, left, y: (i) => top + row * (i + 0.5), name: (text) => clipped(visible(text), most) };
}

export function frameOf({ left, row, y }: Rows, i: number): Box {
  return { x: 0, y: y(i) - row / 2 + 3, width: left - 6, height: row - 6 };
}
