/** Work that is done at once where it comes alone; where it comes many times in a row, as of a slider that is drawn, only when that rests. */

import { wait } from "./resource.svelte";

const REST_MS = 150;

export class Rest {
  #timer: ReturnType<typeof setTimeout> | undefined;
  #last = -Infinity;

  /** Do this, in place of what has not been done yet; the page is marked as waiting until then. */
  do(work: () => void): void {
    const now = performance.now();
    const isAlone = now - this.#last > REST_MS;
    this.#last = now;
    this.stop();
    if (isAlone) return work();
    wait(1);
    this.#timer = setTimeout(() => {
      this.stop();
      work();
    }, REST_MS);
  }

  /** Leave what has not been done yet. */
  stop(): void {
    if (this.#timer === undefined) return;
    clearTimeout(this.#timer);
    this.#timer = undefined;
    wait(-1);
  }
}
