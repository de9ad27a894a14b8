/** One head at one token: the row of scores, the mask, the softmax, and the values that are taken by so much. */

import { limitOf } from "../../lib/colors";
import { number, percent, visible } from "../../lib/format";
import type { Data } from "../data/data";
import type { Leaf } from "../depths/leaf";
import type { AttentionNumbers } from "../data/near";
import { lengthOf, lengthText, once, rowOf, tokenAt } from "./shared";

const LATER = 3; // tokens behind this one that are drawn, as the mask hides them
const KEY = { wide: 34, narrow: 26 }; // pixels of a key's column, at least
const TEXT = 15;

/** Where the bands are, from below. */
const BANDS = { tokens: 0.03, scores: [0.1, 0.29], shares: [0.38, 0.57], values: [0.66, 0.82], out: [0.88, 0.98] } as const;

/** The keys that are drawn: the first, which is often the sink, and the last ones up to this token; then some that the mask hides. */
export function keysOf(pos: number, sources: number, most: number): number[] {
  const later = Math.min(LATER, sources - pos - 1, Math.max(0, most - 2));
  const start = Math.max(0, pos + 1 - (most - later));
  const all = Array.from({ length: pos + 1 + later - start }, (_, i) => start + i);
  return start > 0 ? [0, ...all.slice(1)] : all;
}

/** Whether the mask hides a key: a later one, or one before the window. */
const isHidden = ({ scores, pos }: AttentionNumbers, key: number): boolean => key > pos || scores[key] === -Infinity;

interface Key {
  readonly key: number;
  readonly u0: number;
  readonly u1: number;
  readonly middle: number;
  readonly wide: number;
}

export function attention(leaf: Leaf, numbers: AttentionNumbers, data: Data): void {
  const { scores, pos, head } = numbers;
  const { N, K, H } = data.shape;
  const [from, to] = leaf.isNarrow ? [0, 1] : [0.14, 1];
  const most = Math.max(3, Math.floor(((to - from) * leaf.size.width) / (leaf.isNarrow ? KEY.narrow : KEY.wide)));
  const shown = keysOf(pos, scores.length, most);
  const step = (to - from) / Math.max(shown.length, 5);
  const keys = shown.map((key, i): Key => ({ key, u0: from + (i + 0.12) * step, u1: from + (i + 0.88) * step, middle: from + (i + 0.5) * step, wide: step * leaf.size.width }));
  const hue = Math.floor((head * K) / N);
  names(leaf, numbers, data, keys);
  scoreBars(leaf, numbers, data, keys);
  shareBars(leaf, numbers, data, keys, hue);
  const taken = once(numbers.pattern, "taken", () => weighted(numbers, H));
  const limit = limitOf(numbers.out).limit;
  for (const { key, u0, u1 } of keys) {
    if (isHidden(numbers, key)) continue;
    const values = rowOf(taken, key, H);
    leaf.strip(`value${key}`, { u0, u1, v0: BANDS.values[0], v1: BANDS.values[1] }, values, {
      rows: H, limit, alpha: leaf.done(0.65, 0.85), says: lengthOf(`share × value of ${tokenAt(data, key)} for ${tokenAt(data, pos)}, head ${head}`, values),
      cell: (_, i) => ({ name: `share × value[${i}] of ${tokenAt(data, key)}` }),
    });
  }
  leaf.row("out", BANDS.out, numbers.out, {
    label: "their sum", value: lengthText(numbers.out), limit, alpha: leaf.done(0.8, 1), says: lengthOf(`what head ${head} gathers for ${tokenAt(data, pos)}`, numbers.out),
    cell: (_, i) => ({ name: `gathered[${i}] of head ${head}` }),
  });
}

/** Shares times values, (S, H). */
export const weighted = ({ pattern, values }: Pick<AttentionNumbers, "pattern" | "values">, size: number): Float32Array =>
  values.map((value, i) => value * (pattern[Math.floor(i / size)] as number));

/** Beside its band; on a narrow picture above it, and above what is written there. */
function label(leaf: Leaf, id: string, v: readonly [number, number], text: string, above = 15): void {
  if (leaf.isNarrow) leaf.text(id, [0, v[1]], text, { shift: [0, -TEXT / 2 - above], most: leaf.size.width });
  else leaf.text(id, [0, (v[0] + v[1]) / 2], text, { size: "normal", most: 0.13 * leaf.size.width });
}

function names(leaf: Leaf, numbers: AttentionNumbers, data: Data, keys: readonly Key[]): void {
  const { pos, scores } = numbers;
  for (const { key, middle, wide } of keys) {
    const [isChosen, hidden] = [key === pos, isHidden(numbers, key)];
    leaf.text(`key${key}`, [middle, BANDS.tokens], visible(data.tokens[key]?.text ?? ""), { align: "center", mono: true, ink: isChosen ? "chosen" : hidden ? "soft" : "ink", alpha: hidden ? 0.6 : 1, most: wide - 3 });
  }
  if (!leaf.isNarrow) leaf.text("keys", [0, BANDS.tokens], keys.length < scores.length ? `${keys.length} of ${scores.length} keys` : "keys", { size: "normal", most: 0.13 * leaf.size.width });
}

function scoreBars(leaf: Leaf, numbers: AttentionNumbers, data: Data, keys: readonly Key[]): void {
  const { scores, pos, head } = numbers;
  const [v0, v1] = BANDS.scores;
  const seen = keys.filter(({ key }) => !isHidden(numbers, key)).map(({ key }) => scores[key] as number);
  const [low, high] = [Math.min(0, ...seen), Math.max(0, ...seen, 1e-9)];
  const heightOf = (score: number): number => v0 + ((v1 - v0) * (score - low)) / (high - low);
  label(leaf, "scores", BANDS.scores, "scores q·k / √H");
  const zero = heightOf(0);
  leaf.line("zero", [[keys[0]?.u0 ?? 0, zero], [keys.at(-1)?.u1 ?? 1, zero]]);
  for (const { key, u0, u1, middle, wide } of keys) {
    if (isHidden(numbers, key)) {
      leaf.box(`mask${key}`, { u0, u1, v0, v1 }, "line", { corner: 3, alpha: 0.7, says: { name: `score of ${tokenAt(data, key)}, which the mask hides from ${tokenAt(data, pos)}`, value: "−∞" } });
      leaf.text(`mask${key}.name`, [middle, (v0 + v1) / 2], "−∞", { align: "center", most: wide });
      continue;
    }
    const score = scores[key] as number;
    const end = zero + (heightOf(score) - zero) * leaf.done(0, 0.3);
    leaf.box(`score${key}`, { u0, u1, v0: Math.min(zero, end), v1: Math.max(zero, end) }, score < 0 ? "negative" : "positive", {
      alpha: 0.75, says: { name: `score of ${tokenAt(data, pos)} with ${tokenAt(data, key)}, head ${head}`, value: score },
    });
    if (wide >= 34) leaf.text(`score${key}.name`, [middle, heightOf(score)], number(score, 2), { align: "center", mono: true, shift: [0, score < 0 ? 9 : -9], most: wide, alpha: leaf.done(0.1, 0.3) });
  }
}

function shareBars(leaf: Leaf, numbers: AttentionNumbers, data: Data, keys: readonly Key[], hue: number): void {
  const { pattern, pos, head } = numbers;
  const [v0, v1] = BANDS.shares;
  label(leaf, "shares", BANDS.shares, leaf.isNarrow ? "softmax: shares of 1" : "softmax");
  label(leaf, "values", BANDS.values, "share × value", 1);
  for (const { key, u0, u1, middle, wide } of keys) {
    if (isHidden(numbers, key)) continue;
    const share = pattern[key] as number;
    const top = v0 + (v1 - v0) * share * leaf.done(0.3, 0.65);
    leaf.box(`share${key}.room`, { u0, u1, v0, v1 }, "line", { outlined: true, alpha: 0.5 });
    leaf.box(`share${key}`, { u0, u1, v0, v1: top }, "attention", { hue, says: { name: `${tokenAt(data, pos)} takes from ${tokenAt(data, key)}, head ${head}`, value: share, unit: "share" } });
    if (wide >= 34) leaf.text(`share${key}.name`, [middle, v1], percent(share, wide >= 52 ? 1 : 0), { align: "center", mono: true, ink: "ink", shift: [0, -8], most: wide, alpha: leaf.done(0.5, 0.65) });
  }
}
