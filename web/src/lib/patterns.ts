/** What the patterns of all heads come to, in a few numbers each. */
import type { Numbers } from "./numbers";

interface Habit {
  layer: number;
  head: number;
  /** The mean share of the first token. */
  first: number;
  /** The mean share of a query's own token. */
  itself: number;
  /** The mean share of the token before it; of those that are here, where some are left out. */
  before: number;
}

/** Where each head looks on the whole, over all queries but the first, which has no choice: from axes L N T S. */
export function habits({ values, shape }: Pick<Numbers, "values" | "shape">): Habit[] {
  const [layers = 0, heads = 0, size = 0] = shape;
  return Array.from({ length: layers * heads }, (_, i) => {
    const mean = (key: (query: number) => number): number => {
      let sum = 0;
      for (let query = 1; query < size; query++) sum += values[(i * size + query) * size + key(query)] as number;
      return sum / (size - 1);
    };
    return {
      layer: Math.floor(i / heads), head: i % heads,
      first: mean(() => 0), itself: mean((query) => query), before: mean((query) => query - 1),
    };
  });
}
