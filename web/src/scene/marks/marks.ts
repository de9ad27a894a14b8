/** What a scene is made of. A scene is a pure function of data and camera; it returns marks, and everything else is made of these. */

import type { Place } from "../places/place";

/** A point of the world: tokens to the right (a column is one wide, token t stands at x = t), layers upwards (layer l is y = l to l + 1). */
export type Point = readonly [x: number, y: number];

export interface Rect {
  readonly x0: number;
  readonly y0: number;
  readonly x1: number;
  readonly y1: number;
}

/** The roles that a colour can have; `scene/look.ts` gives each one its colour, light and dark. */
export type Ink = "ink" | "soft" | "line" | "panel" | "says" | "attention" | "mlp" | "stream" | "key" | "value" | "negative" | "positive" | "chosen";

interface Common {
  /** Unique in its scene and the same from frame to frame: `t3.l12.mlp`. */
  readonly id: string;
  /** From 0 to 1; 1 where none is given. */
  readonly alpha?: number;
  /** A group of heads, whose colour (`headColor`) is drawn in place of the ink's. */
  readonly hue?: number;
  /** What it shows, in words and as the exact number: the hover, and its row in the table. Marks without it are rules and labels. */
  readonly says?: { readonly name: string; readonly value: number | string; readonly unit?: string };
  /** Where a click on it goes. */
  readonly enter?: Place;
}

/** A filled outline; its sides may be curves of a stream that swells. */
export interface Area extends Common {
  readonly kind: "area";
  readonly points: readonly Point[];
  readonly ink: Ink;
}

export interface Line extends Common {
  readonly kind: "line";
  readonly points: readonly Point[];
  readonly ink: Ink;
  /** In pixels. */
  readonly width: number;
}

/** A cubic curve: what attention brings from a column to a later one. */
export interface Curve extends Common {
  readonly kind: "curve";
  readonly points: readonly [Point, Point, Point, Point];
  readonly ink: Ink;
  readonly width: number;
}

export interface Dot extends Common {
  readonly kind: "dot";
  readonly at: Point;
  /** In pixels. */
  readonly radius: number;
  readonly ink: Ink;
  /** A ring. */
  readonly outlined?: boolean;
}

/** An arrow from a point by an angle: RoPE's hands. */
export interface Hand extends Common {
  readonly kind: "hand";
  readonly at: Point;
  /** In pixels. */
  readonly length: number;
  /** In radians, counter-clockwise from the right. */
  readonly angle: number;
  readonly ink: Ink;
  /** In pixels; a hair where none is given. */
  readonly width?: number;
}

/** A vector or a matrix, one cell a number, in the colours of `lib/colors.ts`. Its rows lie on the screen from top to bottom, also where the picture is turned. */
export interface Cells extends Common {
  readonly kind: "cells";
  readonly rect: Rect;
  readonly rows: number;
  readonly columns: number;
  /** Row by row, the first row on top. */
  readonly values: Float32Array;
  readonly scale: "share" | "signed";
  /** What is drawn in the full colour. */
  readonly limit: number;
  /** What one cell is, for hover and table. */
  readonly cell?: (row: number, column: number) => { readonly name: string; readonly enter?: Place };
}

export interface Text extends Common {
  readonly kind: "text";
  readonly at: Point;
  readonly text: string;
  /** One of four sizes. */
  readonly size: "small" | "normal" | "large" | "title";
  readonly align: "left" | "center" | "right";
  readonly ink: Ink;
  readonly mono?: boolean;
  /** Moved by so many pixels after projection. */
  readonly shift?: Point;
  /** At most so many pixels wide; longer ones end in an ellipsis. */
  readonly most?: number;
}

/** A filled rectangle with round corners: a token, a bar of a probability. */
export interface Box extends Common {
  readonly kind: "box";
  readonly rect: Rect;
  readonly ink: Ink;
  readonly outlined?: boolean;
  /** In pixels. */
  readonly corner?: number;
}

export type Mark = Area | Line | Curve | Dot | Hand | Cells | Text | Box;
