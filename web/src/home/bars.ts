/** What the first screen says of the next token. */
import { MOST_CHARACTERS } from "../lib/texts";
import type { CandidateView } from "../schema";

/** Probabilities of the best tokens at a temperature, by the logits of all tokens. */
export function atTemperature(best: readonly Pick<CandidateView, "token_id">[], logits: Float32Array, temperature: number): number[] {
  let most = -Infinity;
  for (const logit of logits) if (logit > most) most = logit;
  const weight = (logit: number): number => Math.exp((logit - most) / temperature);
  let total = 0;
  for (const logit of logits) total += weight(logit);
  return best.map(({ token_id: id }) => weight(logits[id] as number) / total);
}

/** Whether a token ends a text or is another control token: it has the shape of one. */
export const isControl = (text: string): boolean => /^(<\|.+\|>|<\/?s>|<｜.+｜>)$/.test(text);

/** What the model's tokens are: characters where the vocabulary is small and each token of the text is one. */
export function unitOf(vocabulary: number, tokens: readonly { text: string; is_special: boolean }[]): "token" | "character" {
  const isOne = (text: string): boolean => [...text].length === 1;
  return vocabulary <= MOST_CHARACTERS && tokens.every(({ text, is_special: isSpecial }) => isSpecial || isOne(text)) ? "character" : "token";
}

/** A token's text on a bar: spaces, line ends and what has no picture are seen. */
export function named(text: string): string {
  if (isControl(text)) return "end of text";
  if (text === " ") return "space";
  return text.replace(/^ /, "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";
}
