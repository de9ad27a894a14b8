/** What the stages recompute beside the model's own numbers, to show how these come about. */

export function length(vector: ArrayLike<number>): number {
  return Math.sqrt(dot(vector, vector));
}

export function dot(a: ArrayLike<number>, b: ArrayLike<number>): number {
  let sum = 0;
  for (let i = 0; i < a.length; i++) sum += (a[i] as number) * (b[i] as number);
  return sum;
}

export function mean(values: ArrayLike<number>): number {
  let sum = 0;
  for (let i = 0; i < values.length; i++) sum += values[i] as number;
  return sum / values.length;
}

/** The root of the mean square, as RMSNorm has it. */
export function rms(vector: ArrayLike<number>, eps: number): number {
  return Math.sqrt(dot(vector, vector) / vector.length + eps);
}

/** The places of points on their two main axes: (rows, 2), by power iteration on the centred rows. */
export function principal(values: Float32Array, rows: number, cols: number): { points: [number, number][]; share: number } {
  const centred = Float64Array.from(values);
  for (let col = 0; col < cols; col++) {
    let middle = 0;
    for (let row = 0; row < rows; row++) middle += (centred[row * cols + col] as number) / rows;
    for (let row = 0; row < rows; row++) centred[row * cols + col] = (centred[row * cols + col] as number) - middle;
  }
  // The rows are few and long: the main axes of their products' table (rows by rows) give the same places.
  const gram = Array.from({ length: rows }, (_, i) =>
    Array.from({ length: rows }, (_, j) => dot(row(centred, i, cols), row(centred, j, cols))),
  );
  const total = gram.reduce((sum, line, i) => sum + (line[i] as number), 0);
  const axes: { vector: number[]; weight: number }[] = [];
  for (let axis = 0; axis < 2; axis++) axes.push(mainAxis(gram, axes));
  const points = Array.from({ length: rows }, (_, i): [number, number] => {
    const place = (axis: number): number => (axes[axis]?.vector[i] ?? 0) * Math.sqrt(Math.max(0, axes[axis]?.weight ?? 0));
    return [place(0), place(1)];
  });
  return { points, share: total > 0 ? axes.reduce((sum, one) => sum + Math.max(0, one.weight), 0) / total : 0 };
}

function row(values: Float64Array, i: number, cols: number): Float64Array {
  return values.subarray(i * cols, (i + 1) * cols);
}

/** The strongest axis of a symmetric table that is at right angles to those before it. */
function mainAxis(gram: number[][], before: { vector: number[] }[]): { vector: number[]; weight: number } {
  let vector = gram.map((_, i) => Math.sin(1 + 7 * i)); // any beginning will do; the same one every time
  let weight = 0;
  for (let turn = 0; turn < 300; turn++) {
    for (const { vector: other } of before) {
      const along = dot(vector, other);
      vector = vector.map((value, i) => value - along * (other[i] as number));
    }
    const next = gram.map((line) => dot(line, vector));
    weight = dot(next, vector);
    const size = length(next);
    if (size === 0) return { vector: vector.map(() => 0), weight: 0 };
    vector = next.map((value) => value / size);
  }
  return { vector, weight };
}

/** The mean over the heads of a layer: (L, N, S) becomes (L, S). */
export function meanOfHeads(values: Float32Array, layers: number, heads: number): Float32Array {
  const size = values.length / layers / heads;
  const found = new Float32Array(layers * size);
  for (const [i, value] of values.entries()) {
    const at = Math.floor(i / (heads * size)) * size + (i % size);
    found[at] = (found[at] as number) + value / heads;
  }
  return found;
}
