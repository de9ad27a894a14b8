/** A long text's picture, piece by piece: what its beginning shows is the same in the whole text, as later tokens change nothing of it. */

import type { Far, Shape } from "./data";
import type { Window } from "./far";

const FIRST = 32; // tokens of the first piece: it is there at once
const PIECE_BYTES = 120e6; // of the shares of all heads in a later piece, which the server holds at a time

/** The windows of a text in blocks, one after the other: each is the columns that are new in a text that ends with it. */
export function* piecesOf({ start, stop, block, isMean = false }: Window, layers: number, { N: heads }: Pick<Shape, "N">): Generator<Window> {
  const columns = Math.ceil((stop - start) / block);
  const endOf = (column: number): number => start + block * (column - 1) + 1;
  for (let from = 0; from < columns; ) {
    const [before, pairs] = [from === 0 ? 0 : endOf(from), PIECE_BYTES / (4 * layers * heads)];
    const fitting = (Math.sqrt(before ** 2 + 4 * pairs) - before) / 2; // so many tokens, each with its shares of all up to the last
    const most = from === 0 ? Math.min(FIRST, fitting) : fitting;
    const to = Math.min(columns, from + Math.max(1, Math.floor(most / block)));
    yield { start: start + block * from, stop: endOf(to), block, isMean };
    from = to;
  }
}

/** Pieces side by side. */
export function joined(parts: readonly Far[]): Far {
  const first = parts[0] as Far;
  const rows = (name: "lengths" | "attentionAdded" | "mlpAdded" | "keys" | "values" | "attention", count: number): Float32Array => {
    const found = new Float32Array(parts.reduce((sum, one) => sum + one[name].length, 0));
    let at = 0;
    for (let row = 0; row < count; row++) {
      for (const one of parts) {
        const size = one[name].length / count;
        found.set(one[name].subarray(row * size, (row + 1) * size), at);
        at += size;
      }
    }
    return found;
  };
  const { layers } = first;
  return {
    ...first,
    columns: parts.reduce((sum, one) => sum + one.columns, 0),
    lengths: rows("lengths", layers + 1),
    attention: rows("attention", layers),
    attentionAdded: rows("attentionAdded", layers),
    mlpAdded: rows("mlpAdded", layers),
    keys: rows("keys", layers),
    values: rows("values", layers),
  };
}
