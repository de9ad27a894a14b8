/** The marks of a sheet are made once for its numbers, the picture's size and a moment: a camera that moves paints the same ones. */

import type { Camera } from "../places/camera";
import type { Data } from "../data/data";
import type { Mark } from "./marks";

export class Once {
  readonly #kept = new WeakMap<object, { readonly key: string; readonly marks: readonly Mark[] }>();

  of(numbers: object, { chosen }: Data, { size, turned }: Camera, share: number, make: () => readonly Mark[]): readonly Mark[] {
    const key = [size.width, size.height, turned, share, chosen.pos, chosen.head].join();
    const known = this.#kept.get(numbers);
    if (known?.key === key) return known.marks;
    const marks = make();
    this.#kept.set(numbers, { key, marks });
    return marks;
  }
}
