/** How sharp canvases are drawn: a change draws them again. */
import { large } from "./large.svelte";

class Sharp {
  /** The least that a picture which is being saved needs. */
  least = $state(1);

  /** Pixels of a canvas for a CSS pixel. */
  get value(): number {
    return Math.max((window.devicePixelRatio || 1) * large.zoom, this.least);
  }
}

export const sharp = new Sharp();
