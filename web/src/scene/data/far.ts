/** The server's reply of a pass as a whole, as `inspect/probes/picture.py` puts it together. */

import type { Lens } from "../../schema";
import { columnsBefore, type Far, type Said } from "./data";

export interface Window {
  readonly start: number;
  readonly stop: number;
  readonly block: number;
  /** Whether a column is all of its tokens. */
  readonly isMean?: boolean;
}

/** Read the reply; one of another size is none of this model and window. */
export function readFar(values: Float32Array, { start, stop, block, isMean = false }: Window, layers: number): Far {
  const columns = Math.ceil((stop - start) / block);
  let at = 0;
  const take = (count: number): Float32Array => values.subarray(at, (at += count));
  const lengths = take((layers + 1) * columns);
  const [attentionAdded, mlpAdded, keys, valueLengths] = [take(layers * columns), take(layers * columns), take(layers * columns), take(layers * columns)];
  const attention = values.subarray(at);
  const pairs = (columns * (columns + 1)) / 2 + columns * columnsBefore({ start, block });
  const isWhole = attention.length !== layers * pairs;
  if (isWhole && attention.length !== layers * columns * (columns + columnsBefore({ start, block }))) throw new Error(`${values.length} numbers came for ${columns} columns of ${layers} layers`);
  return { start, block, isMean, isWhole, columns, layers, lengths, attention, attentionAdded, mlpAdded, keys, values: valueLengths };
}

/** A lens of some tokens, put beside what has come of others. */
export function withLens(said: Said | undefined, far: Far, lens: Lens): Said {
  const words = said ? [...said.words] : new Array<string | undefined>(far.layers * far.columns).fill(undefined);
  const probabilities = said ? said.probabilities.slice() : new Float32Array(far.layers * far.columns).fill(NaN);
  for (const { layer, candidates } of lens.layers) {
    candidates.forEach(([best], i) => {
      const at = layer * far.columns + ((lens.positions[i] as number) - far.start) / far.block;
      words[at] = best?.text ?? "";
      probabilities[at] = best?.probability ?? NaN;
    });
  }
  return { words, probabilities };
}

/** The same with room for more columns at the end. */
export function widened(said: Said, layers: number, columns: number, to: number): Said {
  const words = new Array<string | undefined>(layers * to).fill(undefined);
  const probabilities = new Float32Array(layers * to).fill(NaN);
  for (let layer = 0; layer < layers; layer++) {
    for (let c = 0; c < columns; c++) {
      words[layer * to + c] = said.words[layer * columns + c];
      probabilities[layer * to + c] = said.probabilities[layer * columns + c] as number;
    }
  }
  return { words, probabilities };
}
