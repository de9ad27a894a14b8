/**
 * What the cards of the story say: at most 35 words each, with numbers of the pass that is shown. `*` marks what the picture highlights.
 * A number that has not come is undefined, and the sentence that needs it is left out.
 */
import { bytes, count, number, percent, visible } from "../lib/format";

export type Unit = "token" | "character";

export const MOST_WORDS = 35;

/** A token within a sentence. */
export const quoted = (text: string): string => `“${text.trim() || visible(text)}”`;

export interface Piece {
  readonly text: string;
  readonly isMarked: boolean;
}

/** The parts of a sentence, marked ones apart; a number stays with its unit. */
export function partsOf(words: string): Piece[] {
  return words.replace(/ (?=%|[kMG]?B\b)/g, "\u00a0").split("*").map((text, i) => ({ text, isMarked: i % 2 === 1 })).filter(({ text }) => text);
}

const when = <T>(value: T | undefined, said: (value: T) => string): string => (value === undefined ? "" : said(value));

export function pieces({ unit, tokens, vocabulary }: { unit: Unit; tokens: number; vocabulary: number }): string {
  const each = `here ${count(tokens)}. Each has a number, one of ${count(vocabulary)}.`;
  if (unit === "character") return `Text is cut into *characters*: ${each} The model sees nothing but these numbers.`;
  return `Text is cut into pieces, *tokens*: ${each} Common words are one token, rare words break into several.`;
}

export function rows({ unit, width, token, nearest }: { unit: Unit; width: number; token: string; nearest: string | undefined }): string {
  const near = when(nearest, (text) => ` The row most like that of ${quoted(token)} is the one of ${quoted(text)}: similar ${unit}s get similar rows.`);
  return `Each number picks a *row* of a table: ${count(width)} numbers that training has found.${near}`;
}

export function stream({ unit, layers, lengths }: { unit: Unit; layers: number; lengths: readonly [number, number] | undefined }): string {
  const grown = when(lengths, ([from, to]) => ` Its length goes from ${number(from, 3)} to ${number(to, 3)}.`);
  return `That row begins a *stream*. Each of ${layers} layers adds something to it.${grown} At the end, the stream of the last ${unit} makes the guess.`;
}

export function looking({ unit, asking, layer, head }: { unit: Unit; asking: string; layer: number; head: number }): string {
  return `To bring in what stands before, ${quoted(asking)} asks a question, its *query*. Each ${unit} holds out a *key* to be found by. These are of layer ${layer}, head ${head}.`;
}

export function position({ distance, score, beside }: { distance: number; score: number | undefined; beside: number | undefined }): string {
  const now = when(score, (value) => ` Here, ${distance} apart, the two match by *${number(value, 3)}*`);
  const else_ = when(beside, (value) => `; side by side it would be ${number(value, 3)}`);
  return `Query and key are *turned* like the hands of a clock, each by its position. So distance counts.${now}${now && else_}${now && "."}`;
}

export function scores({ asking, best }: { asking: string; best: { text: string; score: number } | undefined }): string {
  const found = best ? `${quoted(best.text)} matches ${quoted(asking)} best: ${number(best.score, 3)}.` : `Which one matches ${quoted(asking)} best?`;
  return `Query times key, number by number, and summed: that is a *score*, how well the two match. ${found}`;
}

export function shares({ unit, asking, best }: { unit: Unit; asking: string; best: { text: string; share: number } | undefined }): string {
  const most = when(best, ({ text, share }) => ` ${quoted(asking)} takes ${percent(share, 0)} from ${quoted(text)}.`);
  return `Softmax makes *shares* of the scores, 100 % together.${most} Nobody looks ahead: later ${unit}s are hidden, or the guess would be no guess.`;
}

export function values({ unit, asking, layer, heads, share }: { unit: Unit; asking: string; layer: number; heads: number; share: { text: string; share: number } | undefined }): string {
  const most = when(share, (one) => ` Most, ${percent(one.share, 0)}, comes from ${quoted(one.text)}.`);
  return `Each ${unit} hands over its *value*, as much as its share, to the stream of ${quoted(asking)}.${most} Layer ${layer} has ${count(heads)} heads, and each looks in its own way.`;
}

export function mlp({ unit, token, layer, neurons, best, active }: { unit: Unit; token: string; layer: number; neurons: number; best: number | undefined; active: number | undefined }): string {
  const fires = best === undefined || active === undefined ? "" : ` For ${quoted(token)}, number ${count(best)} is strongest; ${count(active)} reach a tenth of it.`;
  return `Then the *MLP* changes the stream of each ${unit} on its own. Layer ${layer} has ${count(neurons)} neurons.${fires}`;
}

export function layers({ layers, final, from }: { layers: number; final: string; from: number | undefined }): string {
  const settled = when(from, (layer) => (layer >= layers - 1 ? `Only after the last does ${quoted(final)} lead for good.` : `*After layer ${layer}* it is ${quoted(final)}, and stays so.`));
  return `All of this happens in each of ${layers} layers. One can stop after any of them and ask for the guess. ${settled}`.trim();
}

export function guess({ unit, vocabulary, best }: { unit: Unit; vocabulary: number; best: { text: string; probability: number } | undefined }): string {
  const fits = when(best, ({ text, probability }) => ` *${quoted(text)}* fits best: ${percent(probability)}.`);
  return `The last stream is compared with all ${count(vocabulary)} ${unit}s.${fits} Take the best, or let dice decide: a higher temperature makes them bolder.`;
}

export function again({ unit, tokens, bytesPerToken }: { unit: Unit; tokens: number; bytesPerToken: number }): string {
  return `The ${unit} is appended, and all begins again, for it *alone*: keys and values of the others are kept. This KV cache takes ${bytes(bytesPerToken)} a ${unit}, ${bytes(tokens * bytesPerToken)} here.`;
}

export const numWords = (words: string): number => words.replaceAll("*", "").split(/\s+/).filter(Boolean).length;
