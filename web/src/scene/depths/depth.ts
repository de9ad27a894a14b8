/** What a depth of the picture gives, and when it is seen. */

import type { Camera } from "../places/camera";
import type { Data, Moment } from "../data/data";
import type { Mark } from "../marks/marks";

export interface DepthScene {
  readonly name: string;
  /** How strongly it is drawn: from 0, not at all, to 1. It follows from the pixels that a layer or a column takes. */
  readonly strength: (data: Data, camera: Camera) => number;
  /** Its marks, but for those that lie outside of the camera. The same list where nothing has changed: the painter keeps what it made of it. */
  readonly marks: (data: Data, camera: Camera, moment: Moment) => readonly Mark[];
  /** The same in some lists, painted in their order, where most of them stay as they were while others change. */
  readonly parts?: (data: Data, camera: Camera, moment: Moment) => readonly (readonly Mark[])[];
}

/** From 0 to 1 between two values, without corners. */
export function fade(value: number, from: number, to: number): number {
  const share = Math.min(1, Math.max(0, (value - from) / (to - from)));
  return share * share * (3 - 2 * share);
}
