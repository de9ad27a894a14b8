/** What the page opens with: the guess, and the story of how it comes about. */
import type { ViewEntry } from "../view";

export const home: readonly ViewEntry[] = [
  { id: "first", title: "Guess the next token", component: () => import("./First.svelte"), uses: [] },
  { id: "story", title: "The story", component: () => import("../story/Story.svelte"), uses: [] },
];
