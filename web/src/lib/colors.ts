/** Colours of values, for a light and for a dark page: one scale for what is at least zero, one for what has a sign. */

export type Kind = "share" | "signed";
type Rgb = readonly [number, number, number];

const SHARE: Record<"light" | "dark", Rgb[]> = {
  light: [[250, 250, 250], [198, 219, 239], [107, 174, 214], [33, 113, 181], [8, 48, 107]],
  dark: [[24, 28, 34], [22, 60, 98], [34, 108, 160], [92, 172, 222], [215, 236, 250]],
};
const SIGNED: Record<"light" | "dark", Rgb[]> = {
  light: [[170, 24, 40], [239, 138, 98], [247, 247, 247], [103, 169, 207], [5, 80, 150]],
  dark: [[255, 166, 120], [150, 70, 40], [28, 31, 36], [40, 96, 150], [130, 196, 250]],
};

function stopsOf(kind: Kind, dark: boolean): readonly Rgb[] {
  return (kind === "share" ? SHARE : SIGNED)[dark ? "dark" : "light"];
}

/** The whole scale from left to right, as a background. */
export function gradient(kind: Kind, dark: boolean): string {
  return `linear-gradient(90deg, ${stopsOf(kind, dark).map((stop) => `rgb(${stop.join(", ")})`).join(", ")})`;
}

/** The colour at a place from 0 to 1. */
export function color(kind: Kind, dark: boolean, place: number): Rgb {
  const stops = stopsOf(kind, dark);
  const at = Math.min(1, Math.max(0, place)) * (stops.length - 1);
  const left = Math.min(stops.length - 2, Math.floor(at));
  const [a, b] = [stops[left] as Rgb, stops[left + 1] as Rgb];
  const mix = (i: 0 | 1 | 2): number => Math.round(a[i] + (b[i] - a[i]) * (at - left));
  return [mix(0), mix(1), mix(2)];
}

/** Where a scale ends: at the largest, or where a few are far larger than the others, below them. */
export function limitOf(values: ArrayLike<number>): { limit: number; largest: number } {
  const sizes = Float64Array.from(values, Math.abs).filter(Number.isFinite).sort();
  if (!sizes.length) return { limit: 1, largest: 0 };
  const largest = sizes[sizes.length - 1] as number;
  const usual = sizes[Math.floor(0.98 * (sizes.length - 1))] as number;
  return { limit: (largest > 3 * usual && usual > 0 ? usual : largest) || 1, largest };
}

/** A table of 256 colours, for many cells at once. */
export function table(kind: Kind, dark: boolean): Uint8ClampedArray {
  const found = new Uint8ClampedArray(1024);
  for (let i = 0; i < 256; i++) found.set([...color(kind, dark, i / 255), 255], 4 * i);
  return found;
}

/** A table's colours, or an image's, as whole pixels: copied one by one they take a tenth of the time. */
export function pixels(colors: Uint8ClampedArray): Uint32Array {
  return new Uint32Array(colors.buffer, colors.byteOffset, colors.length / 4);
}
