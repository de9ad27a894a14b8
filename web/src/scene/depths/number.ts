/** Depth 4: one number as the sum that it is: its largest terms, the rest as one, and what rounding made of them. */

import { count, number as written } from "../../lib/format";
import { tokenAt } from "../blocks/shared";
import type { Camera } from "../places/camera";
import type { Data, Moment } from "../data/data";
import type { DepthScene } from "./depth";
import { numberStrength, productPlaces } from "./entered";
import { Leaf } from "./leaf";
import type { Ink, Mark } from "../marks/marks";
import type { ProductNumbers } from "../data/near";
import { Once } from "../marks/once";

const SHOWN = { wide: 8, narrow: 6 } as const;

export interface Term {
  readonly index: number;
  readonly input: number;
  readonly weight: number;
  readonly value: number;
}

export interface Sum {
  /** All terms, the largest first, of either sign. */
  readonly terms: readonly Term[];
  /** What the pass has for their sum. */
  readonly total: number;
  /** By how much that differs from the terms' sum. */
  readonly rounding: number;
}

const known = new WeakMap<ProductNumbers, Sum>();

/** The number of a product's row, term by term. */
export function termsOf(numbers: ProductNumbers): Sum {
  const made = known.get(numbers);
  if (made) return made;
  const { weights, columns, input, output, row, first } = numbers;
  const at = (row - first) * columns;
  const terms = Array.from(input ?? [], (x, index): Term => {
    const weight = weights[at + index] as number;
    return { index, input: x, weight, value: x * weight };
  }).sort((a, b) => Math.abs(b.value) - Math.abs(a.value));
  const total = output[row - first] as number;
  const sum = { terms, total, rounding: total - terms.reduce((all, { value }) => all + value, 0) };
  known.set(numbers, sum);
  return sum;
}

interface Step {
  readonly id: string;
  readonly label: string;
  readonly says: string;
  readonly value: number;
}

/** What is drawn one below the other; together they are the number. */
export function stepsOf(sum: Sum, most: number, isRounded: boolean): Step[] {
  const shown = sum.terms.slice(0, most);
  const rest = sum.terms.slice(most);
  const steps = shown.map(({ index, input, weight, value }): Step => ({
    id: `term${index}`, label: `x[${index}] ${written(input, 3)} × w ${written(weight, 3)}`, says: `term ${index}: ${written(input, 5)} × ${written(weight, 5)}`, value,
  }));
  if (rest.length) steps.push({ id: "rest", label: `${count(rest.length)} smaller terms`, says: `the ${rest.length} smaller terms`, value: rest.reduce((all, { value }) => all + value, 0) });
  const why = isRounded ? "inputs rounded to 8 bits" : "rounding";
  if (sum.rounding !== 0) steps.push({ id: "rounding", label: why, says: `what the pass has beyond the terms' sum: ${why}`, value: sum.rounding });
  return steps;
}

function fill(leaf: Leaf, numbers: ProductNumbers, data: Data): void {
  const { row, input, isRounded, pos, product } = numbers;
  if (!input) {
    leaf.text("none", [0.5, 0.5], "a row is taken from the table: nothing is summed", { size: "large", align: "center", most: leaf.size.width, says: { name: `row of the table that ${tokenAt(data, pos)} takes`, value: row } });
    return;
  }
  const sum = termsOf(numbers);
  const steps = stepsOf(sum, leaf.isNarrow ? SHOWN.narrow : SHOWN.wide, isRounded);
  const step = 0.98 / (steps.length + 1);
  const sums = steps.reduce<number[]>((all, { value }) => [...all, (all.at(-1) ?? 0) + value], [0]);
  const [low, high] = [Math.min(...sums), Math.max(...sums)];
  const [left, right] = leaf.isNarrow ? [0.02, 0.74] : [0.36, 0.82];
  const u = (value: number): number => left + ((right - left) * (value - low)) / (high - low || 1);
  for (const [i, one] of steps.entries()) bar(leaf, { ...one, top: 0.99 - i * step, step, from: u(sums[i] as number), to: u(sums[i + 1] as number), zero: u(0) });
  const [top, end] = [0.99 - steps.length * step, u(sum.total)];
  const says = { name: `${product}[${row}] at ${tokenAt(data, pos)}: the sum of ${count(sum.terms.length)} terms, as the pass has it`, value: sum.total };
  bar(leaf, { id: "total", label: `together: ${product}[${count(row)}]`, says: says.name, value: sum.total, top, step, from: u(0), to: end, zero: u(0), ink: "ink" });
}

interface Bar extends Step {
  readonly top: number;
  readonly step: number;
  readonly from: number;
  readonly to: number;
  readonly zero: number;
  readonly ink?: Ink;
}

/** A term from where the sum stood to where it takes it. */
function bar(leaf: Leaf, { id, label, says, value, top, step, from, to, zero, ink }: Bar): void {
  const [v1, v0] = leaf.isNarrow ? [top - leaf.down(15), top - 0.9 * step] : [top - 0.12 * step, top - 0.88 * step];
  const middle = (v0 + v1) / 2;
  const isTotal = ink !== undefined;
  leaf.line(`${id}.zero`, [[zero, top], [zero, top - step]]);
  leaf.box(id, { u0: Math.min(from, to), u1: Math.max(from, to, Math.min(from, to) + leaf.across(1)), v0, v1 }, ink ?? (value < 0 ? "negative" : "positive"), { corner: 2, says: { name: says, value } });
  const text = { mono: true, ink: isTotal ? "ink" : "soft", size: leaf.isNarrow ? "small" : "normal" } as const;
  if (leaf.isNarrow) leaf.text(`${id}.label`, [0, top], label, { ...text, shift: [0, 7], most: leaf.size.width });
  else leaf.text(`${id}.label`, [0, middle], label, { ...text, most: 0.35 * leaf.size.width });
  leaf.text(`${id}.value`, [1, middle], `${isTotal ? "= " : value < 0 ? "" : "+"}${written(value, isTotal ? 6 : 4)}`, { ...text, ink: "ink", align: "right", most: 0.24 * leaf.size.width });
}

const kept = new Once();

function marks(data: Data, camera: Camera, _: Moment): readonly Mark[] {
  const [numbers, places] = [data.near?.product, productPlaces(data, camera.turned)];
  if (!numbers || !places) return [];
  return kept.of(numbers, data, camera, 1, () => {
    const leaf = new Leaf("s", places.number, camera);
    fill(leaf, numbers, data);
    return leaf.marks;
  });
}

export const number: DepthScene = { name: "number", strength: numberStrength, marks };
