/** Texts that the page offers, by what the model's tokens are. */

const OF_TOKENS = [
  "My grandmother baked a delicious apple", "The capital of France is", "Once upon a time there was a", "2, 4, 6, 8,", "def add(a, b): return a +",
] as const;

/** Short enough for the story, and of characters that a model of English has. */
const OF_CHARACTERS = ["To be, or n", "Good morro", "My noble lo", "What say yo", "Come hithe"] as const;

/** Tokens of a vocabulary that may be one of characters. */
export const MOST_CHARACTERS = 512;

/** The texts for a vocabulary of this size; until it is known, those of words. */
export const textsFor = (vocabulary: number | undefined): readonly [string, ...string[]] =>
  (vocabulary !== undefined && vocabulary <= MOST_CHARACTERS ? OF_CHARACTERS : OF_TOKENS);

/** The text that follows one of these; the first after any other. */
export const textAfter = (text: string, texts: readonly [string, ...string[]]): string => texts[(texts.indexOf(text) + 1) % texts.length] as string;
