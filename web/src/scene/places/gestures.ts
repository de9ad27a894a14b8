/** What drag, pinch and wheel do to the camera. */

import type { Point, Rect } from "../marks/marks";
import { unproject, type Camera } from "./camera";

const PINCH = 0.12; // of a doubling of the fingers' distance: a step
const WHEEL = 60; // pixels of a wheel: a step
const STEP = 0.34; // of the way to the next depth

const moved = ({ x0, x1, y0, y1 }: Rect, x: number, y: number): Rect => ({ x0: x0 + x, x1: x1 + x, y0: y0 + y, y1: y1 + y });

/** The camera after a drag: the point that was taken up lies under the pointer again. */
export function dragged(camera: Camera, from: Point, to: Point): Rect {
  const [a, b] = [unproject(camera, from), unproject(camera, to)];
  return moved(camera.rect, a[0] - b[0], a[1] - b[1]);
}

/** A camera over the world, `all`; one that sees more than all of an axis stands in its middle. `free` axes are left as they are. */
export function kept(one: Rect, all: Rect, free: "y" | undefined): Rect {
  const shift = (a0: number, a1: number, b0: number, b1: number): number =>
    a1 - a0 >= b1 - b0 ? (b0 + b1 - a0 - a1) / 2 : a0 < b0 ? b0 - a0 : a1 > b1 ? b1 - a1 : 0;
  return moved(one, shift(one.x0, one.x1, all.x0, all.x1), free ? 0 : shift(one.y0, one.y1, all.y0, all.y1));
}

/** Two fingers that were so far apart: a step in where they part, out where they meet, none where they hardly move. */
export function pinched(before: number, apart: number): -1 | 0 | 1 {
  if (!before || !apart || Math.abs(Math.log2(apart / before)) < PINCH) return 0;
  return apart > before ? 1 : -1;
}

/** A wheel's turns add up to a step; upwards is in. */
export function wheeled(turns: number, by: number): { readonly turns: number; readonly step: -1 | 0 | 1 } {
  const all = turns + by;
  return Math.abs(all) < WHEEL ? { turns: all, step: 0 } : { turns: 0, step: all < 0 ? 1 : -1 };
}

/** A step on the way to the next depth: 0 is back where it began, 1 is there. */
export const zoomed = (share: number, by: -1 | 1): number => Math.min(1, Math.max(0, share + by * STEP));
