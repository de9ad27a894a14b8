/** How numbers are written: so many digits, never more than were computed. */

/** A number with so many significant digits, the minus as a minus. */
export function number(value: number, digits = 4): string {
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  if (value === 0) return "0";
  const size = Math.abs(value);
  const text = size >= 1e6 || size < 1e-4 ? value.toExponential(digits - 1) : value.toPrecision(digits);
  return (text.includes("e") && size >= 1e-4 && size < 1e6 ? String(Number(text)) : text).replaceAll("-", "−");
}

/** The same for a formula of TeX. */
export function tex(value: number, digits = 4): string {
  const [digitsPart, power] = number(value, digits).replaceAll("−", "-").replace("∞", "\\infty").split("e");
  return power === undefined ? `${digitsPart}` : `${digitsPart} \\cdot 10^{${Number(power)}}`;
}

export function percent(share: number, digits = 1): string {
  return `${(100 * share).toFixed(digits)} %`;
}

/** A count with thin spaces between thousands. */
export function count(value: number): string {
  return value.toLocaleString("en-US").replaceAll(",", "\u202f");
}

/** A number with what it counts: "1 token", "1,024 tokens"; `plural` where it is not the noun with an s. */
export function counted(value: number, noun: string, plural = `${noun}s`): string {
  return `${count(value)} ${value === 1 ? noun : plural}`;
}

/** How many of a row are there, where not all are: "One token in 3". */
export function oneIn(stride: number, what: string): string {
  return `One ${what} in ${stride}`;
}

const UNITS = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]] as const;

/** A large count in a word: 1.24 G. */
export function large(value: number): string {
  const rounded = value < 1e3 ? value : Number(value.toPrecision(3)); // 999 900 is 1.00 M
  const [unit, name] = UNITS.find(([least]) => rounded >= least) ?? [1, ""];
  return name ? `${(rounded / unit).toPrecision(3)} ${name}` : String(value);
}

export function bytes(value: number): string {
  return value < 1e3 ? `${value} B` : `${large(value)}B`;
}

/** So much time: "45 s", "3 min 20 s", "2 h 05 min". */
export function duration(seconds: number): string {
  const whole = Math.round(seconds);
  const two = (value: number): string => String(value).padStart(2, "0");
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
  return `${Math.floor(whole / 3600)} h ${two(Math.floor((whole % 3600) / 60))} min`;
}

/** A token's text so that spaces and line ends are seen. */
export function visible(text: string | null | undefined): string {
  return (text ?? "").replace(/^ /, "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";
}
