/** What stands beside the picture: the open stage's title and its one sentence. The stage gives them, the room shows them. */

import type { Snippet } from "svelte";

interface Beside {
  readonly title: string;
  readonly words: Snippet;
  /** The stage's own picture, where it has one. */
  readonly figure: Snippet | undefined;
}

/** What stands there where the picture is deeper than the stage. */
const DEEPER: Readonly<Record<number, string>> = {
  3: "Each row of the matrix is multiplied with the input, number by number, and summed: a row for each number of the output. Arrow keys choose a row, Enter opens its sum.",
  4: "One number is one sum: its largest terms first, all others as one. What is on the way from here to the next token is sums like this one.",
};

class Besides {
  /** How deep the picture is, and what is seen there. */
  seen = $state.raw<{ depth: number; title: string } | undefined>();
  shown = $state.raw<Beside | undefined>();
  /** Whether there is a picture, beside which they stand. */
  hasPicture = $state(false);

  /** Title and words of a product or a number that has been entered. */
  get deeper(): { title: string; words: string } | undefined {
    const words = DEEPER[this.seen?.depth ?? 0];
    return words && this.seen ? { title: this.seen.title, words } : undefined;
  }
}

export const beside = new Besides();
