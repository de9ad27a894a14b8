/** Numbers of 16 bits, as native/halves.h has them: rounded to nearest, ties to even. */

export type FloatType = "F32" | "F16" | "BF16";

const FLOAT = new Float32Array(1), BITS = new Uint32Array(FLOAT.buffer);

function floatOf(bits: number): number {
  BITS[0] = bits;
  return FLOAT[0] as number;
}

function bitsOf(value: number): number {
  FLOAT[0] = value;
  return BITS[0] as number;
}

export const fromBfloat16 = (half: number): number => floatOf(half << 16);

function toBfloat16(value: number): number {
  const bits = bitsOf(value);
  return (Number.isNaN(value) ? bits | 0x400000 : bits + 0x7fff + ((bits >>> 16) & 1)) >>> 16;
}

function fromHalf(half: number): number {
  const sign = half & 0x8000 ? -1 : 1, exponent = (half >> 10) & 31, mantissa = half & 1023;
  if (exponent === 31) return mantissa ? NaN : sign * Infinity;
  return sign * (exponent ? (1024 + mantissa) * 2 ** (exponent - 25) : mantissa * 2 ** -24);
}

function toHalf(value: number): number {
  const bits = bitsOf(value), sign = (bits >>> 16) & 0x8000, size = bits & 0x7fffffff;
  if (size >= 0x47800000) return sign | (size > 0x7f800000 ? 0x7e00 : 0x7c00);
  if (size >= 0x38800000) return sign | ((size + 0xfff + ((size >>> 13) & 1) - (112 << 23)) >>> 13);
  return sign | (bitsOf(floatOf(size) + 0.5) - 0x3f000000);
}

/** Floats of one type as those of another one; the bytes themselves where it is the same. */
export function cast(bytes: Uint8Array, from: FloatType, to: FloatType): Uint8Array {
  if (from === to) return bytes;
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength), size = from === "F32" ? 4 : 2, count = bytes.length / size;
  const out = to === "F32" ? new Float32Array(count) : new Uint16Array(count);
  for (let i = 0; i < count; i++) {
    const value = from === "F32" ? view.getFloat32(4 * i, true) : (from === "F16" ? fromHalf : fromBfloat16)(view.getUint16(2 * i, true));
    out[i] = to === "F32" ? value : to === "F16" ? toHalf(value) : toBfloat16(value);
  }
  return new Uint8Array(out.buffer);
}
