/** The address line, which names what is shown. Browsers refuse to write it too often: what changes quickly is written now and then. */

const MOST = 8; // times within so long: 100 within 30 s are taken by all browsers
const WITHIN_MS = 2500;

export class Address {
  #stage: string | undefined;
  #link = "";
  /** When it was written, the last times. */
  #written: number[] = [];
  #timer: ReturnType<typeof setTimeout> | undefined;

  /** The browser is at this view by its own history: what is shown of it next is not another one. */
  at(stage: string): void {
    this.#stage = stage;
  }

  /** Name what is shown; another view than before can be left by the browser's way back. */
  show(stage: string, link: string): void {
    const isNew = this.#stage !== undefined && this.#stage !== stage;
    this.#stage = stage;
    this.#link = link;
    clearTimeout(this.#timer);
    const wait = (this.#written.at(-MOST) ?? -Infinity) + WITHIN_MS - performance.now();
    if (isNew || wait <= 0) this.#write(isNew);
    else this.#timer = setTimeout(() => this.#write(false), wait);
  }

  #write(isNew: boolean): void {
    if (this.#link === location.hash) return;
    try {
      if (isNew) history.pushState(null, "", this.#link);
      else history.replaceState(null, "", this.#link);
    } catch {
      // Too often for this browser: the link is written with what changes next, and can be copied meanwhile.
    }
    this.#written = [...this.#written.slice(1 - MOST), performance.now()];
  }
}
