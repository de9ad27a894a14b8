/**
 * How the picture moves: the camera's way from place to place, a pass that rises, a block that is computed. All are functions of the time: the
 * same moment gives the same picture.
 */

import { onTheWay } from "./camera";
import { REST, type Moment } from "../data/data";
import { frameOf, type Extent } from "./layout";
import type { Rect } from "../marks/marks";
import type { Place } from "./place";
import { samePlace, wayTo } from "./stations";

/** One zoom, without a turn: of its two ends one lies within the other, or they are beside each other in the same depth. */
export interface Leg {
  readonly from: Rect;
  readonly to: Rect;
  readonly ms: number;
}

const ZOOM_MS = 420; // for a zoom by e
const [LEAST_MS, MOST_MS] = [260, 900] as const;
const PREFILL_MS = 1600; // for 30 layers, all columns together
const STEP_MS = 800; // the same, one column
const LAYERS = 30;
const BLOCK_MS = 1400; // in which an entered block is computed

/** Slow at both ends. */
export const ease = (share: number): number => (share < 0.5 ? 4 * share ** 3 : 1 - (2 - 2 * share) ** 3 / 2);

/** How large a zoom is, by the axis that changes more; a way to the side counts by the widths that it is long. */
function reach(from: Rect, to: Rect): number {
  const axis = (a0: number, a1: number, b0: number, b1: number): number => {
    const [before, after] = [a1 - a0, b1 - b0];
    const apart = Math.abs(b0 + b1 - a0 - a1) / (before + after);
    return Math.abs(Math.log(after / before)) + Math.min(1, apart);
  };
  return Math.max(axis(from.x0, from.x1, to.x0, to.x1), axis(from.y0, from.y1, to.y0, to.y1));
}

export function legOf(from: Rect, to: Rect): Leg {
  return { from, to, ms: Math.min(MOST_MS, Math.max(LEAST_MS, ZOOM_MS * reach(from, to) ** 0.5)) };
}

/** The deepest place that two places lie in. */
export function commonPlace(a: Place, b: Place): Place {
  const [first, second] = [wayTo(a), wayTo(b)];
  let shared = first[0] as Place;
  first.forEach((place, i) => {
    const other = second[i];
    if (other && samePlace(place, other)) shared = place;
  });
  return shared;
}

/** The camera's way: straight in or out, and to a place beside by what holds both, so that it is seen where one goes. */
export function legsOf(start: Rect, from: Place, to: Place, extent: Extent, turned = false): Leg[] {
  const [end, hub] = [frameOf(to, extent, turned), commonPlace(from, to)];
  if (samePlace(hub, from) || samePlace(hub, to)) return [legOf(start, end)];
  const between = frameOf(hub, extent, turned);
  return [legOf(start, between), legOf(between, end)];
}

export const msOf = (legs: readonly Leg[]): number => legs.reduce((sum, leg) => sum + leg.ms, 0);

/** Where the camera is after so many milliseconds. */
export function rectAt(legs: readonly Leg[], ms: number): Rect {
  let left = ms;
  for (const leg of legs) {
    if (left < leg.ms) return onTheWay(leg.from, leg.to, ease(Math.max(0, left) / leg.ms));
    left -= leg.ms;
  }
  return (legs.at(-1) as Leg).to;
}

/** How long a pass rises: all columns, or one that reads the keys and values of those before. */
export function riseMs(layers: number, isStep: boolean): number {
  return (isStep ? STEP_MS : PREFILL_MS) * Math.min(2, Math.max(0.5, layers / LAYERS));
}

/** How far a pass has risen whose columns from `from` on are new. */
export function riseAt(ms: number, from: number, layers: number): Moment {
  const share = Math.min(1, Math.max(0, ms / riseMs(layers, from > 0)));
  return share < 1 ? { from, height: share * (layers + 1), share: 1 } : REST;
}

/** How far an entered block is computed. */
export function blockAt(ms: number): Moment {
  const share = Math.min(1, Math.max(0, ms / BLOCK_MS));
  return share < 1 ? { ...REST, share } : REST;
}
