/**
 * The path for who begins: eight stations of the picture, each with a question that is answered before it is shown. What is right follows from the
 * pass; before its numbers are there nothing is.
 */

import { count, number, percent, visible } from "../lib/format";
import { pairOf, type Data } from "../scene/data/data";
import type { BlockNumbers } from "../scene/data/near";
import type { Block, Place } from "../scene/places/place";
import { headThatLooks, looksBack, settledAt, STATIONS } from "../scene/places/play";

export interface Choice {
  readonly id: string;
  readonly text: string;
}

export interface Question {
  readonly id: string;
  readonly title: string;
  readonly asks: (data: Data) => string;
  readonly choices: (data: Data) => readonly Choice[];
  /** The id of the choice that the model's numbers bear out; undefined while they are on their way. */
  readonly right: (data: Data) => string | undefined;
  /** What is said once it has been answered. */
  readonly says: (data: Data) => string;
  readonly place: (data: Data) => Place;
}

/** How many tokens a text of this path has. */
export const [LEAST_TOKENS, MOST_TOKENS] = [4, 48] as const;

const last = (data: Data): number => data.tokens.length - 1;

const quoted = (text: string | undefined): string => `“${visible(text ?? "")}”`;

const lastToken = (data: Data): string => quoted(data.tokens.at(-1)?.text);

/** A station of Play: its place and its line. */
function station(id: string): (typeof STATIONS)[number] {
  const found = STATIONS.find((one) => one.id === id);
  if (!found) throw new Error(`Play has no station ${id}`);
  return found;
}

type OfBlock<B, T = BlockNumbers> = T extends { block: infer X } ? (B extends X ? T : never) : never;

/** The numbers of a block of the last token, where they have come. */
function blockOf<B extends Block>(data: Data, block: B): OfBlock<B> | undefined {
  const found = data.near?.block;
  return found?.block === block && found.pos === last(data) ? (found as OfBlock<B>) : undefined;
}

/** Choices that are numbers: each once, from small to large. */
function numbered(values: readonly number[], text: (value: number) => string = count): Choice[] {
  return [...new Set(values)].sort((a, b) => a - b).map((value) => ({ id: String(value), text: text(value) }));
}

/** Choices that are ranges: each up to a limit, the last without one. */
interface Range extends Choice {
  readonly below: number;
}

const within = (ranges: readonly Range[], value: number | undefined): string | undefined =>
  value === undefined || Number.isNaN(value) ? undefined : ranges.find((one) => value < one.below)?.id;

const GROWTH: readonly Range[] = [
  { id: "shorter", text: "shorter", below: 1 },
  { id: "little", text: "longer, at most twice", below: 2 },
  { id: "some", text: "2 to 10 times as long", below: 10 },
  { id: "much", text: "more than 10 times as long", below: Infinity },
];

const SURE: readonly Range[] = [
  { id: "10", text: "less than 10 %", below: 0.1 },
  { id: "30", text: "10 to 30 %", below: 0.3 },
  { id: "60", text: "30 to 60 %", below: 0.6 },
  { id: "100", text: "60 % or more", below: Infinity },
];

/** Length of the last token's stream, in the table and after the last layer. */
export function lengthsOf({ far, extent, tokens }: Data): readonly [number, number] | undefined {
  if (!far || far.block !== 1) return undefined;
  const column = tokens.length - 1 - far.start;
  return [far.lengths[column] as number, far.lengths[extent.layers * far.columns + column] as number];
}

/** How many times the angle of position 1 the last token's query was turned: measured on the pair that is longest among those that have not come round. */
export function turnsOf(data: Data): number | undefined {
  const found = blockOf(data, "rope");
  if (!found) return undefined;
  const { q, qTurned, frequencies } = found;
  const half = q.length / 2;
  let [longest, turns] = [0, undefined as number | undefined];
  for (const [i, frequency] of frequencies.entries()) {
    const [a, b, c, d] = [q[i], q[i + half], qTurned[i], qTurned[i + half]] as [number, number, number, number];
    const size = Math.hypot(a, b);
    if (size <= longest || frequency * found.pos > 3) continue;
    const angle = Math.atan2(a * d - b * c, a * c + b * d);
    [longest, turns] = [size, angle / frequency];
  }
  return turns;
}

/** What attention and the MLP add to the last token in the layer that the path looks at. */
function addedIn(data: Data): { attention: number; mlp: number } | undefined {
  const found = data.near?.layer;
  const at = last(data) - (found?.start ?? 0);
  if (!found || found.layer !== looksBack(data).layer || at >= found.count) return undefined;
  return { attention: found.attention[at] as number, mlp: found.mlp[at] as number };
}

/** Earlier tokens that one may look at: those with the largest shares, in the order of the text. */
export function keysOf(data: Data, most = 4): number[] {
  const { far } = data;
  if (!far || far.block !== 1) return [];
  const { layer } = looksBack(data);
  const share = (key: number): number => far.attention[pairOf(far, layer, last(data) - far.start, key)] as number;
  const keys = Array.from({ length: Math.max(0, last(data) - 1) }, (_, i) => i + 1);
  return keys.sort((a, b) => share(b) - share(a)).slice(0, most).sort((a, b) => a - b);
}

const nearest = (values: readonly number[], to: number): number =>
  values.reduce((best, value) => (Math.abs(Math.log(value / to)) < Math.abs(Math.log(best / to)) ? value : best));

const multiples = (data: Data): number[] => [1, last(data), last(data) ** 2];

const RANKS = [0, 1, 3, 6]; // of what may come next, those that are offered

const whole = (data: Data): Place => ({ ...station("mind").place(data), depth: 0 });

export const PATH: readonly Question[] = [
  {
    id: "tokens", title: "Tokens", place: (data) => station("text").place(data),
    asks: () => "The model reads numbers. So the text is cut into tokens, each with a number. How many tokens are there here?",
    choices: (data) => {
      const text = data.tokens.map((one) => one.text).join("");
      const [letters, words] = [[...text].length, text.trim().split(/\s+/).length];
      return numbered([1, words, data.tokens.length, data.tokens.length + 2, letters]);
    },
    right: (data) => String(data.tokens.length),
    says: (data) => station("text").words(data),
  },
  {
    id: "row", title: "A vector", place: (data) => station("row").place(data),
    asks: (data) => `Each token has a row of numbers in a table: its vector. How many numbers are in the row of ${lastToken(data)}?`,
    choices: ({ shape: { D, V } }) => numbered([1, 3, D, V]),
    right: (data) => blockOf(data, "row")?.row.length.toString(),
    says: (data) => station("row").words(data),
  },
  {
    id: "stream", title: "The stream", place: (data) => station("norm").place(data),
    asks: (data) => `The vector of ${lastToken(data)} goes up through ${data.extent.layers} layers, and each adds to it. This is the residual stream. How long is it at the end, compared with the row?`,
    choices: () => GROWTH,
    right: (data) => {
      const found = lengthsOf(data);
      return within(GROWTH, found && found[1] / found[0]);
    },
    says: (data) => {
      const [first, end] = lengthsOf(data) ?? [NaN, NaN];
      return `From length ${number(first, 3)} to ${number(end, 3)}: ${number(end / first, 3)} times. What reads it needs numbers of one size, so a norm makes a copy of one size first. Here is the norm of layer ${looksBack(data).layer}.`;
    },
  },
  {
    id: "attention", title: "Attention", place: (data) => station("look").place(data),
    asks: (data) => `Attention takes something from earlier tokens. Layer ${looksBack(data).layer}, all heads together, the first token left out: from which does ${lastToken(data)} take most?`,
    choices: (data) => keysOf(data).map((key) => ({ id: String(key), text: `${quoted(data.tokens[key]?.text)}, token ${key}` })),
    right: (data) => (data.far?.block === 1 ? String(looksBack(data).key) : undefined),
    says: (data) => `${station("look").words(data)} All heads together: ${percent(looksBack(data).share, 0)}.`,
  },
  {
    id: "position", title: "Position", place: (data) => station("hands").place(data),
    asks: (data) => `Order must count: “dog bites man” is not “man bites dog”. So queries and keys are turned, like hands of a clock. How far is token ${last(data)} turned, compared with token 1?`,
    choices: (data) => numbered(multiples(data), (value) => (value === 1 ? "just as far" : `${count(value)} times as far`)),
    right: (data) => {
      const turns = turnsOf(data);
      return turns === undefined ? undefined : String(nearest(multiples(data), Math.max(turns, 1e-9)));
    },
    says: (data) => station("hands").words(data),
  },
  {
    id: "mlp", title: "The MLP", place: (data) => station("mlp").place(data),
    asks: (data) => `A layer adds twice: first attention, then the MLP, which sees one token alone. Which adds the longer vector to ${lastToken(data)} in layer ${looksBack(data).layer}?`,
    choices: () => [{ id: "attention", text: "attention" }, { id: "mlp", text: "the MLP" }],
    right: (data) => {
      const found = addedIn(data);
      return found && (found.mlp > found.attention ? "mlp" : "attention");
    },
    says: (data) => {
      const found = addedIn(data);
      return `${found ? `Attention adds length ${number(found.attention, 3)}, the MLP ${number(found.mlp, 3)}. ` : ""}${station("mlp").words(data)}`;
    },
  },
  {
    id: "next", title: "The next token", place: whole,
    asks: () => "At the top, the stream of the last token is compared with every token. Which comes out as the most likely next one?",
    choices: (data) => {
      const all = data.next?.candidates ?? [];
      return RANKS.flatMap((rank) => all[rank] ?? []).map(({ id, text }) => ({ id: String(id), text: quoted(text) })).sort((a, b) => (a.text < b.text ? -1 : 1));
    },
    right: (data) => data.next?.candidates[0]?.id.toString(),
    says: (data) => {
      const settled = settledAt(data);
      const best = quoted(data.next?.candidates[0]?.text);
      const since = !settled ? "comes out first" : settled.layer < data.extent.layers - 1 ? `is in front from layer ${settled.layer} on` : "comes to the front in the last layer";
      return `${best} ${since}. The words along the streams are read by the logit lens: what each stream would say if the model ended there.`;
    },
  },
  {
    id: "sure", title: "How sure", place: (data) => station("draw").place(data),
    asks: (data) => `Every token gets a probability. How sure is the model of ${quoted(data.next?.candidates[0]?.text)}?`,
    choices: () => SURE,
    right: (data) => within(SURE, data.next?.candidates[0]?.probability),
    says: (data) => {
      const best = data.next?.candidates[0];
      return `${percent(best?.probability ?? NaN)} for ${quoted(best?.text)}; all ${count(data.shape.V)} together are 100 %. A sampler may cut the unlikely ones; then one is drawn. ${station("draw").words(data)}`;
    },
  },
];

/** Where the path begins, and where its question waits for an answer: what was shown last. */
export function placeAt(data: Data, at: number, isAnswered: boolean): Place {
  if (at >= PATH.length) return whole(data);
  const question = PATH[isAnswered ? at : at - 1];
  return question ? question.place(data) : whole(data);
}

/** What is drawn: not what a question that is still open asks for. */
export function drawnAt(data: Data, isAnswered: (id: string) => boolean): Data {
  return { ...data, said: isAnswered("next") ? data.said : undefined, next: isAnswered("sure") ? data.next : undefined };
}

// --- the five questions ---

/** A question of the course, its answer by this pass, and the section that has more. */
export interface Learned {
  readonly asks: string;
  readonly says: (data: Data) => string;
  readonly chapter: string;
  readonly section: string;
}

export const FIVE: readonly Learned[] = [
  {
    asks: "What is a token?", chapter: "from-text-to-vectors", section: "text-becomes-ids",
    says: (data) => `A piece of text with a number. Here there are ${count(data.tokens.length)}; ${lastToken(data)} is number ${count(data.tokens.at(-1)?.id ?? NaN)} of ${count(data.shape.V)}.`,
  },
  {
    asks: "What is a vector?", chapter: "from-text-to-vectors", section: "ids-become-vectors",
    says: ({ shape: { D } }) => `A list of ${count(D)} numbers. A token's vector begins as a row of the table, and every layer adds to it.`,
  },
  {
    asks: "What does attention bring?", chapter: "how-attention-works", section: "one-head-in-four-lines",
    says: (data) => {
      const [{ layer, key }, { head, share }] = [looksBack(data), headThatLooks(data)];
      const much = share === undefined ? "" : `: in head ${head} ${percent(share, 0)} of what it gathers`;
      return `Something of earlier tokens. In layer ${layer}, ${lastToken(data)} takes most from ${quoted(data.tokens[key]?.text)}${much}.`;
    },
  },
  {
    asks: "What does the MLP add?", chapter: "what-a-layer-does", section: "swiglu-each-token-for-itself",
    says: (data) => `A vector that is made of one token alone, by ${count(data.shape.F)} neurons, in each of ${data.extent.layers} layers.`,
  },
  {
    asks: "How is a token chosen?", chapter: "how-a-sentence-grows", section: "choosing",
    says: (data) => {
      const best = data.next?.candidates[0];
      return `By a draw: each of ${count(data.shape.V)} tokens has a probability${best ? `, ${quoted(best.text)} ${percent(best.probability)}` : ""}. The drawn token is put behind the text, and the model goes on.`;
    },
  },
];

// --- progress ---

type ByQuestion = Readonly<Record<string, string>>;

export interface Progress {
  /** The station that is open; after the last one the end is. */
  readonly at: number;
  /** The chosen answers, and those that the model's numbers bore out. */
  readonly chosen: ByQuestion;
  readonly right: ByQuestion;
}

export const BEGIN: Progress = { at: 0, chosen: {}, right: {} };

/** Read what was kept of a pass; of another one, or of something else, nothing. */
export function readProgress(text: string | null, of: string): Progress {
  let kept: Record<string, unknown>;
  try {
    kept = { ...(JSON.parse(text ?? "") as object) };
  } catch {
    return BEGIN;
  }
  const { at } = kept;
  if (kept["of"] !== of || typeof at !== "number" || !Number.isInteger(at) || at < 0) return BEGIN;
  const [chosen, right] = [byQuestion(kept["chosen"]), byQuestion(kept["right"])];
  const open = PATH.findIndex((question) => !(question.id in chosen));
  return { at: Math.min(at, open < 0 ? PATH.length : open), chosen, right };
}

function byQuestion(kept: unknown): ByQuestion {
  const entries = Object.entries({ ...(kept as object) }).filter(([id, one]) => typeof one === "string" && PATH.some((question) => question.id === id));
  return Object.fromEntries(entries) as ByQuestion;
}

export const writeProgress = (progress: Progress, of: string): string => JSON.stringify({ of, ...progress });

/** Answer the open question; an answer stays. */
export function answered(progress: Progress, choice: string): Progress {
  const { id } = PATH[progress.at] ?? {};
  return id === undefined || id in progress.chosen ? progress : { ...progress, chosen: { ...progress.chosen, [id]: choice } };
}

/** Go a station on or back; on only where the open one is answered. */
export function moved(progress: Progress, by: 1 | -1): Progress {
  const open = PATH[progress.at];
  if (by > 0 && (!open || !(open.id in progress.chosen))) return progress;
  return { ...progress, at: Math.max(0, Math.min(PATH.length, progress.at + by)) };
}

/** How many answers the model's numbers bore out. */
export const numRight = ({ chosen, right }: Progress): number => PATH.filter(({ id }) => id in chosen && chosen[id] === right[id]).length;
