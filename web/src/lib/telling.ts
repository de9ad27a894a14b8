/** What of a pass tells most: a head that looks back at one token, the layers in a few groups, the layer that settles the guess. */

export interface Look {
  readonly layer: number;
  readonly head: number;
  /** The token that it looks at most, and how much it takes from there. */
  readonly key: number;
  readonly share: number;
}

const LEAST_SHARE = 0.3; // from which a better place is preferred to a larger share
const WORD = /\p{L}{3}/u;

/**
 * The head in which a token looks back most, of all layers; `patterns` are its shares, (L, N, S), and `texts` those of the tokens.
 *
 * Not at the first token, where heads rest that find nothing. A look past the neighbour is preferred, and best at a word: that is the one of
 * which a reader sees the point.
 */
export function tellingLook(patterns: Float32Array, { layers, heads, query, texts }: { layers: number; heads: number; query: number; texts: readonly string[] }): Look {
  const best: (Look | undefined)[] = [];
  for (let layer = 0; layer < layers; layer++) {
    for (let head = 0; head < heads; head++) {
      for (let key = 1; key < query; key++) {
        const share = patterns[(layer * heads + head) * texts.length + key] as number;
        const kind = key === query - 1 ? 2 : WORD.test(texts[key] ?? "") ? 0 : 1;
        if (share > (best[kind]?.share ?? 0)) best[kind] = { layer, head, key, share };
      }
    }
  }
  const largest = best.reduce((most, one) => (one && one.share > (most?.share ?? 0) ? one : most), undefined);
  return best.find((one) => one && one.share >= LEAST_SHARE) ?? largest ?? { layer: 0, head: 0, key: 0, share: patterns[0] as number };
}

/** Some layers that follow each other. */
export type Band = readonly [first: number, last: number];

/** The layers in so many groups of about one size. */
export function groupsOf(layers: number, most = 3): readonly Band[] {
  const count = Math.min(most, layers);
  return Array.from({ length: count }, (_, i) => [Math.round((i * layers) / count), Math.round(((i + 1) * layers) / count) - 1] as const);
}

/** The layer after which the lens reads what it reads at the end, and no more changes. */
export function settledAt(words: readonly (number | undefined)[]): number {
  const final = words.at(-1);
  let layer = words.length - 1;
  while (layer > 0 && words[layer - 1] === final) layer--;
  return layer;
}

/** The place of the largest number. */
export function largest(values: ArrayLike<number>): number {
  let best = 0;
  for (let i = 1; i < values.length; i++) if ((values[i] as number) > (values[best] as number)) best = i;
  return best;
}

/** Text of so many characters of a fixed width at most; what is cut off says so. */
export function clipped(text: string, characters: number): string {
  const all = [...text];
  return all.length <= characters ? text : `${all.slice(0, Math.max(1, characters - 1)).join("")}…`;
}
