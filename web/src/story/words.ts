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
  const each = `${count(tokens)} of them here. Each has a number, out of ${count(vocabulary)}.`;
  if (unit === "character") return `Text is cut into *characters*, ${each} The model sees nothing but these numbers.`;
  return `Text is cut into pieces called *tokens*, ${each} A common word is one token; a rare word breaks into several.`;
}

export function rows({ unit, width, token, nearest }: { unit: Unit; width: number; token: string; nearest: string | undefined }): string {
  const near = when(nearest, (text) => ` Similar ${unit}s have similar rows: the one closest to ${quoted(token)} is ${quoted(text)}.`);
  return `A ${unit}'s number picks a *row* of a table: ${count(width)} numbers, learned in training.${near}`;
}

export function stream({ unit, layers, lengths }: { unit: Unit; layers: number; lengths: readonly [number, number] | undefined }): string {
  const grown = when(lengths, ([from, to]) => ` Its length goes from ${number(from, 3)} to ${number(to, 3)}.`);
  return `That row is the start of a *stream*. Each of ${layers} layers adds something to it.${grown} At the end, the stream of the last ${unit} makes the guess.`;
}

export function looking({ unit, asking, layer, head }: { unit: Unit; asking: string; layer: number; head: number }): string {
  return `To use what came before, ${quoted(asking)} asks a question, its *query*. Every ${unit} so far offers a *key*, a label to be found by. Shown here: layer ${layer}, head ${head}.`;
}

export function position({ distance, score, beside }: { distance: number; score: number | undefined; beside: number | undefined }): string {
  const now = when(score, (value) => ` At distance ${distance}, they match with a score of *${number(value, 3)}*`);
  const else_ = when(beside, (value) => `; side by side, it would be ${number(value, 3)}`);
  return `Query and key are *turned* like clock hands, each by its position, so the distance between them matters.${now}${now && else_}${now && "."}`;
}

export function scores({ unit, asking, best }: { unit: Unit; asking: string; best: { text: string; score: number } | undefined }): string {
  const found = best ? `${quoted(best.text)} matches ${quoted(asking)} best: ${number(best.score, 3)}.` : `Which ${unit} matches ${quoted(asking)} best?`;
  return `Multiply query and key number by number, add up, and scale: that is the *score*, which says how well the two match. ${found}`;
}

export function shares({ unit, asking, best }: { unit: Unit; asking: string; best: { text: string; share: number } | undefined }): string {
  const most = when(best, ({ text, share }) => `: ${quoted(asking)} takes ${percent(share, 0)} from ${quoted(text)}`);
  return `Softmax turns the scores into *shares* that add up to 100 %${most}. Later ${unit}s are hidden; otherwise the model could peek at the answer.`;
}

export function values({ unit, asking, layer, heads, share }: { unit: Unit; asking: string; layer: number; heads: number; share: { text: string; share: number } | undefined }): string {
  const most = when(share, (one) => `: ${percent(one.share, 0)} comes from ${quoted(one.text)}`);
  return `Each ${unit} passes its *value* to ${quoted(asking)}, weighted by its share${most}. The sum joins the stream. Layer ${layer} has ${count(heads)} heads; each looks in its own way.`;
}

export function mlp({ unit, token, layer, neurons, best, active }: { unit: Unit; token: string; layer: number; neurons: number; best: number | undefined; active: number | undefined }): string {
  const fires = best === undefined || active === undefined ? "" : ` For ${quoted(token)}, neuron ${count(best)} is the most active; ${count(active)} reach at least a tenth of that.`;
  return `Next, the *MLP* works on each ${unit} alone. Layer ${layer} has ${count(neurons)} neurons.${fires}`;
}

export function layers({ layers, final, from }: { layers: number; final: string; from: number | undefined }): string {
  const settled = when(from, (layer) => (layer >= layers - 1 ? `Only after the last one does ${quoted(final)} lead for good.` : `*From layer ${layer} on*, ${quoted(final)} leads.`));
  return `All of this happens ${layers} times, layer after layer. One can stop after any layer and ask for the guess. ${settled}`.trim();
}

export function guess({ unit, vocabulary, best }: { unit: Unit; vocabulary: number; best: { text: string; probability: number } | undefined }): string {
  const fits = when(best, ({ text, probability }) => `; *${quoted(text)}* fits best, with ${percent(probability)}`);
  return `The final stream is compared with all ${count(vocabulary)} ${unit}s${fits}. Take the best, or roll dice: a higher temperature gives unlikely ${unit}s a better chance.`;
}

export function again({ unit, tokens, bytesPerToken }: { unit: Unit; tokens: number; bytesPerToken: number }): string {
  return `The ${unit} is appended and everything starts over, but only for the *new ${unit}*: keys and values of the others are kept. This KV cache takes ${bytes(bytesPerToken)} per ${unit}, ${bytes(tokens * bytesPerToken)} here.`;
}

export const numWords = (words: string): number => words.replaceAll("*", "").split(/\s+/).filter(Boolean).length;
