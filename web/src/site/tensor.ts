/** Arrays with named axes, and the few operations that the views need. Sums are in double precision, results are rounded to float32. */

export interface Tensor {
  readonly values: Float32Array;
  readonly shape: readonly number[];
  /** A letter for each axis, of the project's legend. */
  readonly axes: string;
}

export const sizeOf = (shape: readonly number[]): number => shape.reduce((product, one) => product * one, 1);

export const range = (start: number, stop: number, step = 1): number[] =>
  Array.from({ length: Math.max(0, Math.ceil((stop - start) / step)) }, (_, i) => start + i * step);

/** Some indices of one axis, in this order. */
export function take({ values, shape, axes }: Tensor, axis: string, indices: readonly number[]): Tensor {
  const at = axes.indexOf(axis);
  const [outer, inner] = [sizeOf(shape.slice(0, at)), sizeOf(shape.slice(at + 1))];
  const size = shape[at] as number;
  const taken = new Float32Array(outer * indices.length * inner);
  for (let o = 0; o < outer; o++) {
    indices.forEach((index, i) => {
      const from = (o * size + index) * inner;
      taken.set(values.subarray(from, from + inner), (o * indices.length + i) * inner);
    });
  }
  return { values: taken, shape: shape.with(at, indices.length), axes };
}

/** One index of an axis, which goes. */
export function pick(tensor: Tensor, axis: string, index: number): Tensor {
  const at = tensor.axes.indexOf(axis);
  const { values, shape } = take(tensor, axis, [index]);
  return { values, shape: shape.toSpliced(at, 1), axes: tensor.axes.replace(axis, "") };
}

/** Tensors of one shape behind each other, along a new first axis. */
export function stack(tensors: readonly Tensor[], axis: string): Tensor {
  const [first] = tensors as readonly [Tensor];
  const values = new Float32Array(tensors.length * first.values.length);
  tensors.forEach((one, i) => values.set(one.values, i * first.values.length));
  return { values, shape: [tensors.length, ...first.shape], axes: axis + first.axes };
}

/** One row of a matrix of this width. */
export const row = (values: Float32Array, index: number, width: number): Float32Array => values.subarray(index * width, (index + 1) * width);

export function dot(a: ArrayLike<number>, b: ArrayLike<number>): number {
  let sum = 0;
  for (let i = 0; i < a.length; i++) sum += (a[i] as number) * (b[i] as number);
  return sum;
}

/** The length of a vector. */
export const lengthOf = (vector: ArrayLike<number>): number => Math.sqrt(dot(vector, vector));

/** The softmax of a row; at least one number is finite. */
export function softmax(scores: Float32Array): Float32Array {
  const most = scores.reduce((a, b) => Math.max(a, b), -Infinity);
  let total = 0;
  for (const score of scores) total += Math.exp(score - most);
  return scores.map((score) => Math.exp(score - most) / total);
}

/** The natural logarithm of the softmax of a row. */
export function logSoftmax(logits: Float32Array): Float32Array {
  const most = logits.reduce((a, b) => Math.max(a, b), -Infinity);
  let total = 0;
  for (const logit of logits) total += Math.exp(logit - most);
  const log = Math.log(total);
  return logits.map((logit) => logit - most - log);
}

/** Indices of the k largest numbers, the largest first, the lowest index among equals. */
export function largest(values: Float32Array, k: number): number[] {
  const floor = values.length > k ? (values.toSorted()[values.length - k] as number) : -Infinity;
  const found: number[] = [];
  values.forEach((value, i) => {
    if (value >= floor) found.push(i);
  });
  return found.sort((a, b) => (values[b] as number) - (values[a] as number) || a - b).slice(0, k);
}
