/** Numbers in bulk, as the server sends them (`llamarium/page/binary.py`): little-endian bytes, and headers that say what they are. */

export interface Numbers {
  values: Float32Array;
  shape: number[];
  /** A letter for each axis, of the project's legend. */
  axes: string;
  /** Every so many tokens of T and S were taken. */
  stride: number;
  /** Half of the step between two values that can be told apart; 0 is exact. */
  error: number;
}

const STEPS = 254;
const NOT_FINITE = 255;

export function decode(headers: Headers, body: ArrayBuffer): Numbers {
  const text = (name: string): string => {
    const value = headers.get(name);
    if (value === null) throw new Error(`the server's answer has no header ${name}`);
    return value;
  };
  const dtype = text("x-dtype");
  const shape = text("x-shape").split(",").filter(Boolean).map(Number);
  const low = dtype === "uint8" ? Number(text("x-min")) : 0;
  const high = dtype === "uint8" ? Number(text("x-max")) : 0;
  const values = dtype === "float32" ? floats(body) : dtype === "float16" ? halves(body) : codes(body, low, high);
  const size = shape.reduce((product, one) => product * one, 1);
  if (values.length !== size) throw new Error(`${values.length} numbers came, and ${size} were told; ask again`);
  return { values, shape, axes: text("x-axes"), stride: Number(text("x-stride")), error: (high - low) / STEPS / 2 };
}

const isLittle = new Uint8Array(Uint16Array.of(1).buffer)[0] === 1;

function floats(body: ArrayBuffer): Float32Array {
  if (isLittle && body.byteLength % 4 === 0) return new Float32Array(body);
  const view = new DataView(body);
  return Float32Array.from({ length: body.byteLength / 4 }, (_, i) => view.getFloat32(4 * i, true));
}

function codes(body: ArrayBuffer, low: number, high: number): Float32Array {
  return Float32Array.from(new Uint8Array(body), (code) =>
    code === NOT_FINITE ? -Infinity : low + (code * (high - low)) / STEPS,
  );
}

function halves(body: ArrayBuffer): Float32Array {
  const view = new DataView(body);
  return Float32Array.from({ length: body.byteLength / 2 }, (_, i) => half(view.getUint16(2 * i, true)));
}

/** The number that 16 bits are: a sign, 5 bits of exponent, 10 of fraction. */
export function half(bits: number): number {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return exponent ? sign * 2 ** (exponent - 15) * (1 + fraction / 1024) : sign * 2 ** -14 * (fraction / 1024);
}

/** The part of an array under one index of its first axis. */
export function at(numbers: Numbers, index: number): Numbers {
  const shape = numbers.shape.slice(1);
  const size = shape.reduce((product, one) => product * one, 1);
  const values = numbers.values.subarray(index * size, (index + 1) * size);
  return { ...numbers, values, shape, axes: numbers.axes.slice(1) };
}
