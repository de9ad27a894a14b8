/** The last norm of rows of the residual stream, as numpy computes it in `NativeRunner.read_stream`: the same bits. */

const f = Math.fround;

/** numpy's sum of float32: pairwise, of up to 128 numbers eight side by side. */
function pairwise(x: Float32Array, begin: number, count: number): number {
  if (count < 8) {
    let sum = f(-0);
    for (let i = 0; i < count; i++) sum = f(sum + (x[begin + i] as number));
    return sum;
  }
  if (count > 128) {
    const half = Math.floor(count / 2) - (Math.floor(count / 2) % 8);
    return f(pairwise(x, begin, half) + pairwise(x, begin + half, count - half));
  }
  const r = Array.from(x.subarray(begin, begin + 8)) as [number, number, number, number, number, number, number, number];
  let i = 8;
  for (; i + 8 <= count; i += 8) for (let j = 0; j < 8; j++) r[j] = f((r[j] as number) + (x[begin + i + j] as number));
  let sum = f(f(f(r[0] + r[1]) + f(r[2] + r[3])) + f(f(r[4] + r[5]) + f(r[6] + r[7])));
  for (; i < count; i++) sum = f(sum + (x[begin + i] as number));
  return sum;
}

/** x (n, hidden), each row over the root of its mean square, times the norm's weights. */
export function normalised(x: Float32Array, norm: Float32Array, eps: number): Float32Array {
  const hidden = norm.length, out = new Float32Array(x.length), squares = new Float32Array(hidden);
  for (let row = 0; row < x.length; row += hidden) {
    for (let i = 0; i < hidden; i++) squares[i] = (x[row + i] as number) ** 2;
    const mean = f(pairwise(squares, 0, hidden) / hidden);
    const factor = f(f(1 / f(Math.sqrt(f(mean + f(eps))))) + f(0 * mean)); // NaN after an infinity
    for (let i = 0; i < hidden; i++) out[row + i] = f(x[row + i] as number) * f(factor * (norm[i] as number));
  }
  return out;
}
