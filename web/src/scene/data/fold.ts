/** Layers folded into a few bands: how the far picture begins, until it is unfolded. */

import { groupsOf, type Band } from "../../lib/telling";
import type { Data, Far, Said } from "./data";

const MOST = 6; // bands
const FEW = 12; // layers that are drawn one by one in any case

export const canFold = (layers: number): boolean => layers > FEW;

/** The layers that a row of the picture is of; one where nothing is folded. */
export const bandOf = ({ bands }: Pick<Far, "bands">, row: number): Band => bands?.[row] ?? [row, row];

/** How many layers that are. */
export function tallOf(far: Pick<Far, "bands">, row: number): number {
  const [first, last] = bandOf(far, row);
  return last + 1 - first;
}

/** The row of a layer. */
export const rowOf = ({ bands }: Pick<Far, "bands">, layer: number): number => (bands ? bands.findIndex(([, last]) => layer <= last) : layer);

const foldedFars = new WeakMap<Far, Far>();
const foldedSaids = new WeakMap<Said, Said>();

function once<T extends object>(known: WeakMap<T, T>, of: T, make: () => T): T {
  const before = known.get(of);
  if (before) return before;
  const made = make();
  known.set(of, made);
  return made;
}

/** The same data as the far picture shows it folded: lengths and the lens are those after a band's last layer, all else the mean over its layers. */
export function folded(data: Data): Data {
  const { far, said } = data;
  if (!data.isFolded || !far) return data;
  const bands = groupsOf(far.layers, MOST);
  return { ...data, far: once(foldedFars, far, () => foldFar(far, bands)), said: said && once(foldedSaids, said, () => foldSaid(said, far, bands)) };
}

function foldFar(far: Far, bands: readonly Band[]): Far {
  const mean = (values: Float32Array): Float32Array => means(values, far.layers, bands);
  const lengths = new Float32Array((bands.length + 1) * far.columns);
  lengths.set(far.lengths.subarray(0, far.columns));
  bands.forEach(([, last], row) => lengths.set(far.lengths.subarray((last + 1) * far.columns, (last + 2) * far.columns), (row + 1) * far.columns));
  return {
    ...far, bands, layers: bands.length, lengths, attention: mean(far.attention), attentionAdded: mean(far.attentionAdded),
    mlpAdded: mean(far.mlpAdded), keys: mean(far.keys), values: mean(far.values),
  };
}

function means(values: Float32Array, layers: number, bands: readonly Band[]): Float32Array {
  const size = values.length / layers;
  const found = new Float32Array(bands.length * size);
  for (const [row, [first, last]] of bands.entries()) {
    for (let i = 0; i < size; i++) {
      let sum = 0;
      for (let layer = first; layer <= last; layer++) sum += values[layer * size + i] as number;
      found[row * size + i] = sum / (last + 1 - first);
    }
  }
  return found;
}

function foldSaid(said: Said, { layers, columns }: Far, bands: readonly Band[]): Said {
  const rows = bands.map(([, last]) => last * columns);
  if (said.probabilities.length !== layers * columns) throw new RangeError("a lens of another pass");
  return {
    words: rows.flatMap((at) => said.words.slice(at, at + columns)),
    probabilities: Float32Array.from(rows.flatMap((at) => Array.from(said.probabilities.subarray(at, at + columns)))),
  };
}
