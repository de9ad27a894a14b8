/** Numbers to places along an axis, and the round numbers that are written beside it. */

export interface Scale {
  (value: number): number;
  readonly domain: readonly [number, number];
  /** About so many round numbers within the domain; of a logarithmic one powers of ten, where there are two. */
  ticks(most: number): number[];
}

/** The round distance, 1, 2 or 5 times a power of ten, that divides a span in about so many parts. */
function stepOf(span: number, parts: number): number {
  const rough = span / parts;
  const power = 10 ** Math.floor(Math.log10(rough));
  const share = rough / power;
  return power * (share >= Math.sqrt(50) ? 10 : share >= Math.sqrt(10) ? 5 : share >= Math.SQRT2 ? 2 : 1);
}

/** Whole numbers from one to another, those included. */
const wholes = (from: number, to: number): number[] => Array.from({ length: Math.max(0, to - from + 1) }, (_, i) => from + i);

/** `nice` is the number of parts to whose round ends the domain is widened. */
export function linear([low, high]: readonly [number, number], [from, to]: readonly [number, number], nice?: number): Scale {
  const round = nice === undefined ? undefined : stepOf(high - low, nice);
  const [first, last] = round === undefined ? [low, high] : [Math.floor(low / round) * round, Math.ceil(high / round) * round];
  const ticks = (most: number): number[] => {
    const step = stepOf(last - first, most);
    const digits = Math.max(0, -Math.floor(Math.log10(step)));
    return wholes(Math.ceil(first / step - 1e-9), Math.floor(last / step + 1e-9)).map((i) => Number((i * step).toFixed(digits)));
  };
  return Object.assign((value: number) => from + ((value - first) / (last - first)) * (to - from), { domain: [first, last] as const, ticks });
}

/** Of numbers above zero. */
export function logarithmic([low, high]: readonly [number, number], [from, to]: readonly [number, number]): Scale {
  const ticks = (most: number): number[] => {
    const tens = wholes(Math.ceil(Math.log10(low) - 1e-9), Math.floor(Math.log10(high) + 1e-9));
    const every = Math.max(1, Math.ceil(tens.length / most));
    if (tens.length > 1) return tens.filter((_, i) => i % every === 0).map((power) => 10 ** power);
    const power = 10 ** Math.floor(Math.log10(low));
    const found = [1, 2, 5, 10, 20, 50].map((digit) => digit * power).filter((value) => value >= low * (1 - 1e-9) && value <= high * (1 + 1e-9));
    return found.length > 1 ? found : linear([low, high], [0, 1]).ticks(most);
  };
  return Object.assign((value: number) => from + (Math.log(value / low) / Math.log(high / low)) * (to - from), { domain: [low, high] as const, ticks });
}
