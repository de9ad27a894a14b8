/** Which layer, head and token are looked at. Selectors that sweep over many run ahead: only where they rest is anything asked for. */

import { LAST } from "./link";
import { Rest } from "./rest";

interface Place {
  layer: number;
  head: number;
  pos: number;
}

export class Selection implements Place {
  layer = $state(0);
  head = $state(0);
  pos = $state(LAST);
  #ahead = $state.raw<Partial<Place>>({});
  readonly #rest = new Rest();

  /** Where the selectors stand. */
  get going(): Place {
    const { layer, head, pos } = this;
    return { layer, head, pos, ...this.#ahead };
  }

  /** Move a selector. */
  go(to: Partial<Place>): void {
    this.#ahead = { ...this.#ahead, ...to };
    this.#rest.do(() => {
      Object.assign(this, this.#ahead);
      this.#ahead = {};
    });
  }

  /** Let go of where they were going: what that was in is no more there. */
  protected stay(): void {
    this.#rest.stop();
    this.#ahead = {};
  }
}
