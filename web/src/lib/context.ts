/** How near streams are to each other: of a word in two sentences, or of a text whose end was changed. */
import { dot, length } from "./algebra";

/** The cosine of the angle between two rows of equally many numbers, for each row: (rows, size) both. */
export function cosines(a: Float32Array, b: Float32Array, size: number): number[] {
  return rows(a, b, size).map(([x, y]) => dot(x, y) / (length(x) * length(y)));
}

/** How long the difference of each two rows is, for the length of the second. */
export function distances(a: Float32Array, b: Float32Array, size: number): number[] {
  return rows(a, b, size).map(([x, y]) => {
    const apart = x.map((value, i) => value - (y[i] as number));
    return length(apart) / length(y);
  });
}

/** How many numbers have other bits. */
export function differing(a: Float32Array, b: Float32Array): number {
  const [x, y] = [bits(a), bits(b)];
  return x.reduce((sum, one, i) => sum + (one === y[i] ? 0 : 1), 0);
}

function bits(values: Float32Array): Uint32Array {
  return new Uint32Array(values.slice().buffer);
}

function rows(a: Float32Array, b: Float32Array, size: number): [Float32Array, Float32Array][] {
  const cut = (values: Float32Array, i: number): Float32Array => values.subarray(i * size, (i + 1) * size);
  return Array.from({ length: a.length / size }, (_, i) => [cut(a, i), cut(b, i)]);
}

/** Of (L, T, D) the first `count` tokens of every layer: (L, count, D). */
export function firstTokens(values: Float32Array, shape: readonly number[], count: number): Float32Array {
  const [layers = 0, tokens = 0, size = 0] = shape;
  const found = new Float32Array(layers * count * size);
  for (let layer = 0; layer < layers; layer++) {
    const from = layer * tokens * size;
    found.set(values.subarray(from, from + count * size), layer * count * size);
  }
  return found;
}
