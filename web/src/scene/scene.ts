/**
 * The picture as data: every depth that is near enough to be seen gives its marks. Pure: the same data, camera and moment give the same marks.
 *
 * A depth is a file of its own and a line in `DEPTHS`. Depths fade into each other while the camera moves, by the pixels that a unit takes.
 */

import type { Camera } from "./places/camera";
import { REST, type Data, type Moment } from "./data/data";
import type { DepthScene } from "./depths/depth";
import type { Mark } from "./marks/marks";
import { block } from "./depths/block";
import { layer } from "./depths/layer";
import { number } from "./depths/number";
import { product } from "./depths/product";
import { whole } from "./depths/whole";

/** Marks that are drawn equally strongly. */
export interface Sheet {
  readonly name: string;
  readonly strength: number;
  readonly marks: readonly Mark[];
}

/** From far to near; what is near lies above. */
export const DEPTHS: readonly DepthScene[] = [whole, layer, block, product, number];

export function sheets(data: Data, camera: Camera, moment: Moment = REST, depths: readonly DepthScene[] = DEPTHS): Sheet[] {
  return depths
    .map((one) => ({ name: one.name, strength: one.strength(data, camera), of: one }))
    .filter(({ strength }) => strength > 0.01)
    .flatMap(({ name, strength, of }) => (of.parts?.(data, camera, moment) ?? [of.marks(data, camera, moment)]).map((marks) => ({ name, strength, marks })));
}

export function scene(data: Data, camera: Camera, moment: Moment = REST): Mark[] {
  return sheets(data, camera, moment).flatMap((sheet) => sheet.marks);
}
