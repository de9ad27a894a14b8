/** The mark under a point, by the same marks that are painted: what lies above is found first. */

import { project, type Camera } from "../places/camera";
import type { Cells, Curve, Mark, Point } from "./marks";
import { boxOf, placeOf } from "./paint";
import type { Sheet } from "../scene";
import { widthOf, SIZES } from "./look";

const SLACK = 4; // pixels around what is thin
const STEPS = 16; // of a curve
const FAINT = 0.25; // what is drawn less strongly is not found

export interface Found {
  readonly mark: Mark;
  /** The cell, where the mark has some. */
  readonly cell?: { readonly row: number; readonly column: number };
}

/** The topmost mark that says something or can be entered; of what is only near, the nearest. */
export function pick(sheets: readonly Sheet[], camera: Camera, at: Point, slack = SLACK): Found | undefined {
  let best: { found: Found; apart: number; name: string } | undefined;
  for (const { marks, strength, name } of [...sheets].reverse()) {
    if (best && best.name !== name) return best.found; // what is deeper lies above
    if (strength < FAINT) continue;
    for (let i = marks.length - 1; i >= 0; i--) {
      const mark = marks[i] as Mark;
      if (!mark.says && !mark.enter && mark.kind !== "cells") continue;
      const apart = distance(mark, camera, at);
      if (apart <= 0) return foundOf(mark, camera, at);
      if (apart <= slack && apart < (best?.apart ?? Infinity)) best = { found: foundOf(mark, camera, at), apart, name };
    }
  }
  return best?.found;
}

function foundOf(mark: Mark, camera: Camera, at: Point): Found {
  return mark.kind === "cells" ? { mark, cell: cellAt(mark, camera, at) } : { mark };
}

export function cellAt(mark: Cells, camera: Camera, [x, y]: Point): { row: number; column: number } {
  const { left, top, width, height } = boxOf(mark.rect, camera);
  const within = (value: number, most: number): number => Math.min(most - 1, Math.max(0, Math.floor(value)));
  return { row: within(((y - top) / height) * mark.rows, mark.rows), column: within(((x - left) / width) * mark.columns, mark.columns) };
}

/** How far a point is from a mark, in pixels; 0 within it. */
function distance(mark: Mark, camera: Camera, at: Point): number {
  if (mark.kind === "box" || mark.kind === "cells") {
    const { left, top, width, height } = boxOf(mark.rect, camera);
    return toBox(at, left, top, width, height);
  }
  if (mark.kind === "text") {
    const [x, y] = placeOf(mark, camera);
    const wide = Math.min(mark.most ?? Infinity, widthOf(mark.text, mark.size, mark.mono));
    const left = mark.align === "left" ? x : mark.align === "right" ? x - wide : x - wide / 2;
    return toBox(at, left, y - SIZES[mark.size] / 2, wide, SIZES[mark.size]);
  }
  if (mark.kind === "dot" || mark.kind === "hand") {
    const [x, y] = project(camera, mark.at);
    const apart = Math.hypot(x - at[0], y - at[1]);
    return mark.kind === "hand" ? apart - mark.length : mark.outlined ? Math.abs(apart - mark.radius) : apart - mark.radius;
  }
  const points = (mark.kind === "curve" ? along(mark, camera, at) : mark.points.map((one) => project(camera, one))) ?? [];
  if (mark.kind === "area") return isWithin(points, at) ? 0 : Infinity;
  let least = Infinity;
  for (let i = 1; i < points.length; i++) least = Math.min(least, toSegment(at, points[i - 1] as Point, points[i] as Point));
  return least - mark.width / 2;
}

function toBox([x, y]: Point, left: number, top: number, width: number, height: number): number {
  return Math.hypot(Math.max(0, left - x, x - left - width), Math.max(0, top - y, y - top - height));
}

/** Points of a curve; none where it is far away. */
function along({ points }: Curve, camera: Camera, at: Point): Point[] | undefined {
  const [a, b, c, d] = points.map((one) => project(camera, one)) as [Point, Point, Point, Point];
  const far = (i: 0 | 1): boolean => at[i] < Math.min(a[i], b[i], c[i], d[i]) - SLACK || at[i] > Math.max(a[i], b[i], c[i], d[i]) + SLACK;
  if (far(0) || far(1)) return undefined;
  const mix = (i: 0 | 1, t: number): number => (1 - t) ** 3 * a[i] + 3 * (1 - t) ** 2 * t * b[i] + 3 * (1 - t) * t * t * c[i] + t ** 3 * d[i];
  return Array.from({ length: STEPS + 1 }, (_, i) => [mix(0, i / STEPS), mix(1, i / STEPS)] as const);
}

function isWithin(points: readonly Point[], [x, y]: Point): boolean {
  let inside = false;
  for (let i = 0, j = points.length - 1; i < points.length; j = i++) {
    const [[ax, ay], [bx, by]] = [points[i] as Point, points[j] as Point];
    if (ay > y !== by > y && x < ((bx - ax) * (y - ay)) / (by - ay) + ax) inside = !inside;
  }
  return inside;
}

function toSegment([x, y]: Point, [ax, ay]: Point, [bx, by]: Point): number {
  const [dx, dy] = [bx - ax, by - ay];
  const share = Math.min(1, Math.max(0, ((x - ax) * dx + (y - ay) * dy) / (dx * dx + dy * dy || 1)));
  return Math.hypot(ax + share * dx - x, ay + share * dy - y);
}
