/** What stands beside the picture: the open stage's title and its one sentence. The stage gives them, the room shows them. */

import type { Snippet } from "svelte";

interface Beside {
  readonly title: string;
  readonly words: Snippet;
}

class Besides {
  shown = $state.raw<Beside | undefined>();
  /** Whether there is a picture, beside which they stand. */
  hasPicture = $state(false);
}

export const beside = new Besides();
