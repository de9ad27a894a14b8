/** Kinds of heads, by the share of their attention that goes to something: as `llama.inspect.head_kinds` has them. */

import type { HeadKind } from "../schema";

export const KINDS = {
  previous: "at the previous token",
  first: "at the first token",
  induction: "at what followed the same token before",
} as const;

export type Kind = keyof typeof KINDS;

/** What such heads are called. */
export const NAMES: Readonly<Record<Kind, string>> = { previous: "previous token", first: "first token (sink)", induction: "induction" };

/** The head with the largest share of a kind; none where no token of the text could show it. */
export function bestOf(heads: readonly HeadKind[], kind: Kind): HeadKind | undefined {
  const [first, ...others] = heads.filter((one) => one[kind] !== null);
  return others.reduce((a, b) => ((b[kind] ?? -1) > ((a as HeadKind)[kind] ?? -1) ? b : a), first);
}
