/** Answers that are not asked for again: as many as fit into so many bytes, the last used ones. */

interface Entry {
  answer: Promise<unknown>;
  bytes: number;
}

/** What came, and about how much memory it takes. */
export interface Sized<T> {
  value: T;
  bytes: number;
}

export class Kept {
  readonly #most: number;
  readonly #entries = new Map<string, Entry>();
  #bytes = 0;

  constructor(mostBytes: number) {
    this.#most = mostBytes;
  }

  /** Ask once; a second question of this name, also while the first is under way, gets the same answer. */
  once<T>(name: string, ask: () => Promise<Sized<T>>): Promise<T> {
    const known = this.#entries.get(name);
    if (known) {
      this.#entries.delete(name);
      this.#entries.set(name, known); // the last used
      return known.answer as Promise<T>;
    }
    const asked = ask();
    const answer = asked.then(({ value }) => value);
    const entry: Entry = { answer, bytes: 0 };
    this.#entries.set(name, entry);
    asked.then(
      ({ bytes }) => this.#count(name, entry, bytes),
      () => this.#drop(name, entry),
    );
    return answer;
  }

  clear(): void {
    this.#entries.clear();
    this.#bytes = 0;
  }

  #count(name: string, entry: Entry, bytes: number): void {
    if (this.#entries.get(name) !== entry) return; // cleared meanwhile
    entry.bytes = bytes;
    this.#bytes += bytes;
    for (const [oldest, one] of this.#entries) {
      if (this.#bytes <= this.#most) return;
      this.#drop(oldest, one);
    }
  }

  #drop(name: string, entry: Entry): void {
    if (this.#entries.get(name) !== entry) return;
    this.#entries.delete(name);
    this.#bytes -= entry.bytes;
  }
}
