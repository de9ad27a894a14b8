/** Play: a sentence flies through the model in eight stations. Where each is and what is said there follows from the pass; a number that has not come yet is not said. */

import { rms } from "../../lib/algebra";
import { count, number, percent, visible } from "../../lib/format";
import { columnAlone, pairOf, type Data, type Far } from "../data/data";
import type { BlockNumbers } from "../data/near";
import type { Block, Place } from "./place";

export interface Station {
  readonly id: string;
  readonly title: string;
  readonly place: (data: Data) => Place;
  /** A line of words, with numbers of this pass. */
  readonly words: (data: Data) => string;
}

const quoted = (data: Data, pos: number): string => `“${visible(data.tokens[pos]?.text ?? "")}”`;

const lastOf = (data: Data): number => data.tokens.length - 1;

/** The layer in which the last token looks back most, and where to; the first token, which may be the sink, is left out. */
export function looksBack(data: Data): { layer: number; key: number; share: number } {
  const { far } = data;
  let best = { layer: Math.floor(data.extent.layers / 3), key: Math.max(0, lastOf(data) - 1), share: 0 };
  const query = columnAlone(far, lastOf(data));
  if (!far || query === undefined) return best;
  for (let layer = 0; layer < far.layers; layer++) {
    for (let key = 1; key < lastOf(data); key++) {
      const share = far.attention[pairOf(far, layer, query, key)] as number;
      if (share > best.share) best = { layer, key, share };
    }
  }
  return best;
}

/** The head of that layer that looks there most, and by how much; the chosen one until its shares have come. */
export function headThatLooks(data: Data): { head: number; share: number | undefined } {
  const { layer, key } = looksBack(data);
  const numbers = data.near?.layer;
  if (numbers?.layer !== layer || numbers.start + numbers.count !== data.tokens.length) return { head: data.chosen.head, share: undefined };
  const shares = Array.from({ length: data.shape.N }, (_, head) => numbers.pattern[(head * numbers.count + numbers.count - 1) * numbers.sources + key] as number);
  const share = Math.max(...shares);
  return { head: shares.indexOf(share), share };
}

/** After which layer the lens reads what it reads at the end, and no more changes. */
export function settledAt(data: Data): { layer: number; word: string; probability: number } | undefined {
  const { far, said } = data;
  const column = columnAlone(far, lastOf(data));
  if (!far || !said || column === undefined) return undefined;
  const word = said.words[(far.layers - 1) * far.columns + column];
  if (word === undefined) return undefined;
  let layer = far.layers - 1;
  while (layer > 0 && said.words[(layer - 1) * far.columns + column] === word) layer--;
  return { layer, word, probability: said.probabilities[(far.layers - 1) * far.columns + column] as number };
}

const lengthAt = (far: Far | undefined, layer: number, pos: number): number | undefined => atToken(far, far?.lengths, layer, pos);

/** A number of a layer at a token, where it has a column. */
function atToken(far: Far | undefined, values: Float32Array | undefined, layer: number, pos: number): number | undefined {
  const column = columnAlone(far, pos);
  return far && column !== undefined ? values?.[layer * far.columns + column] : undefined;
}

function at(data: Data, place: Partial<Place> & Pick<Place, "depth">): Place {
  return { pos: lastOf(data), layer: looksBack(data).layer, head: headThatLooks(data).head, ...place };
}

type OfBlock<B, T = BlockNumbers> = T extends { block: infer X } ? (B extends X ? T : never) : never;

/** What the block's numbers say, where they are of this station's place. */
function blockOf<B extends Block>(data: Data, block: B): OfBlock<B> | undefined {
  const found = data.near?.block;
  return found?.block === block && found.pos === lastOf(data) ? (found as OfBlock<B>) : undefined;
}

export const STATIONS: readonly Station[] = [
  {
    id: "text", title: "Text to tokens", place: (data) => at(data, { depth: 2, block: "text" }),
    words: (data) => `The text becomes ${data.tokens.length === 1 ? "1 token" : `${count(data.tokens.length)} tokens`}: bytes that were often seen together are joined. ${quoted(data, lastOf(data))} is number ${count(data.tokens.at(-1)?.id ?? 0)} of ${count(data.shape.V)}.`,
  },
  {
    id: "row", title: "A row of the table", place: (data) => at(data, { depth: 2, block: "row" }),
    words: (data) => `That number names a row of the table: ${count(data.shape.D)} learned numbers. With them the token's residual stream begins${lengthText(lengthAt(data.far, 0, lastOf(data)))}.`,
  },
  {
    id: "norm", title: "A norm", place: (data) => at(data, { depth: 2, block: "norm" }),
    words: (data) => {
      const { layer } = looksBack(data);
      const length = lengthAt(data.far, layer, lastOf(data));
      const found = blockOf(data, "norm");
      const grown = layer === 0 || length === undefined ? `The stream goes into layer ${layer}` : `${layer} ${layer === 1 ? "layer" : "layers"} later the stream is${lengthText(length).replace(",", "")}`;
      return `${grown}. Before attention reads it, a copy is brought to one size${found ? `: divided by the root of its mean square, ${number(rms(found.before, found.eps), 3)}` : ""}.`;
    },
  },
  {
    id: "look", title: "A head looks back", place: (data) => at(data, { depth: 1 }),
    words: (data) => {
      const [{ layer, key }, { head, share }] = [looksBack(data), headThatLooks(data)];
      if (lastOf(data) === 0) return `Attention brings in what earlier tokens offer. Here there is one token, which can only look at itself.`;
      return `${quoted(data, lastOf(data))} looks back: in layer ${layer}${share === undefined ? " a head" : `, head ${head}`} takes ${share === undefined ? "much" : percent(share, 0)} of what it gathers from ${quoted(data, key)}.`;
    },
  },
  {
    id: "hands", title: "Hands turn", place: (data) => at(data, { depth: 2, block: "rope" }),
    words: (data) => {
      const first = blockOf(data, "rope")?.frequencies[0];
      return `It finds its place by angles: each pair of a query or key is turned by the token's position${first === undefined ? "" : `, ${lastOf(data)}, the first pair by ${number(lastOf(data) * first, 3)} rad`}. What is near is turned alike.`;
    },
  },
  {
    id: "mlp", title: "The MLP adds", place: (data) => at(data, { depth: 2, block: "mlp" }),
    words: (data) => {
      const { layer } = looksBack(data);
      const { far } = data;
      const share = atToken(far, far?.mlpAdded, layer, lastOf(data));
      const best = blockOf(data, "mlp")?.neurons[0];
      return `Then the MLP looks at this token alone: ${count(data.shape.F)} neurons${best ? `, of which number ${count(best.index)} fires most` : ""}. What they add is ${share === undefined ? "put on the stream" : `${percent(share, 0)} of the stream's length`}.`;
    },
  },
  {
    id: "mind", title: "The stream has made up its mind", place: (data) => at(data, { depth: 0 }),
    words: (data) => {
      const settled = settledAt(data);
      if (!settled) return `Layer by layer the stream turns towards what comes next. The lens reads it on the way.`;
      const last = data.extent.layers - 1;
      return `${settled.layer < last ? `After layer ${settled.layer} the lens reads “${visible(settled.word)}” behind it, and keeps to it` : `Up to the last layer the lens changes its reading; then it is “${visible(settled.word)}”`}: ${percent(settled.probability)} at the end.`;
    },
  },
  {
    id: "draw", title: "A token is drawn", place: (data) => at(data, { depth: 2, block: "logits", layer: data.extent.layers - 1 }),
    words: (data) => {
      const found = blockOf(data, "logits");
      const drawn = found?.sampled;
      const share = drawn?.steps.at(-1)?.candidates.find((one) => one.token_id === drawn.token_id)?.probability;
      if (!drawn) return `The head gives each of ${count(data.shape.V)} tokens a probability; one of them is drawn.`;
      return `“${visible(drawn.text)}” is drawn${share === undefined ? "" : `, at ${percent(share)}`}. It becomes a column of its own, and everything begins again: one column, which reads the cache of the others.`;
    },
  },
];

const lengthText = (length: number | undefined): string => (length === undefined ? "" : `, of length ${number(length, 3)}`);

/** What is said after a token was drawn. */
export function grownWords(data: Data): string {
  const last = lastOf(data);
  const best = data.next?.candidates[0];
  const next = best ? ` Now “${visible(best.text)}” is the most likely, ${percent(best.probability)}.` : "";
  return `${quoted(data, last)} is column ${last}: it alone rises, and reads the keys and values of ${count(last)} older columns in each of ${data.extent.layers} layers.${next}`;
}
