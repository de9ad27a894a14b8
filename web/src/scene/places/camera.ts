/**
 * What part of the world fills the picture. Both axes are scaled apart: entering a layer stretches it to the full height and leaves the
 * columns where they stand; entering a block then widens one column. On a narrow page the picture is turned: tokens go down, layers to the right.
 */

import type { Point, Rect } from "../marks/marks";

export interface Size {
  readonly width: number;
  readonly height: number;
}

export interface Camera {
  readonly rect: Rect;
  readonly size: Size;
  readonly turned: boolean;
}

/** Pixels of a point of the world, from the upper left corner. */
export function project({ rect, size, turned }: Camera, [x, y]: Point): Point {
  const along = (x - rect.x0) / (rect.x1 - rect.x0);
  const up = (y - rect.y0) / (rect.y1 - rect.y0);
  return turned ? [up * size.width, along * size.height] : [along * size.width, (1 - up) * size.height];
}

/** The point of the world at a pixel. */
export function unproject({ rect, size, turned }: Camera, [left, top]: Point): Point {
  const along = turned ? top / size.height : left / size.width;
  const up = turned ? left / size.width : 1 - top / size.height;
  return [rect.x0 + along * (rect.x1 - rect.x0), rect.y0 + up * (rect.y1 - rect.y0)];
}

/** How many pixels one unit of x and one of y take. */
export function scaleOf({ rect, size, turned }: Camera): { x: number; y: number } {
  return {
    x: (turned ? size.height : size.width) / (rect.x1 - rect.x0),
    y: (turned ? size.width : size.height) / (rect.y1 - rect.y0),
  };
}

const between = (a: number, b: number, share: number): number => a + (b - a) * share;

/** A camera on the way from one rectangle to another: widths change by equal factors in equal times, so that no end of the way is rushed. */
export function onTheWay(from: Rect, to: Rect, share: number): Rect {
  const axis = (a0: number, a1: number, b0: number, b1: number): [number, number] => {
    const [before, after] = [a1 - a0, b1 - b0];
    const width = before * (after / before) ** share;
    // The point that both ends have at the same place of the picture stays there, where there is one.
    const moved = Math.abs(after / before - 1) < 1e-6 ? share : (width - before) / (after - before);
    const start = between(a0, b0, moved);
    return [start, start + width];
  };
  const [x0, x1] = axis(from.x0, from.x1, to.x0, to.x1);
  const [y0, y1] = axis(from.y0, from.y1, to.y0, to.y1);
  return { x0, y0, x1, y1 };
}
