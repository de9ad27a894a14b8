/** Kinds of heads, by the share of their attention that goes to something: as `llama.inspect.head_kinds` has them. */

export const KINDS = {
  previous: "at the previous token",
  first: "at the first token",
  induction: "at what followed the same token before",
} as const;

export type Kind = keyof typeof KINDS;
