/** RoPE: each pair of a query or key is a hand, turned by its frequency times the position. */

import { number } from "../../lib/format";
import type { Data } from "../data/data";
import type { Leaf } from "../depths/leaf";
import type { RopeNumbers } from "../data/near";
import type { Part } from "../places/sheet";
import { tokenAt } from "./shared";

const LINE = 20; // pixels of a heading
const FULL = 0.7; // of the largest size that full rows may cost

interface Side {
  readonly id: string;
  readonly title: string;
  readonly before: Float32Array;
  readonly after: Float32Array;
  readonly part: Part;
}

export function rope(leaf: Leaf, numbers: RopeNumbers, data: Data): void {
  const { head, pos, frequencies } = numbers;
  const { N, K } = data.shape;
  const group = Math.floor((head * K) / N);
  const foot = leaf.down(3 * LINE);
  const [left, right]: readonly [Part, Part] = leaf.isNarrow
    ? [{ u0: 0, u1: 1, v0: foot, v1: 0.49 }, { u0: 0, u1: 1, v0: 0.52, v1: 1 }]
    : [{ u0: 0, u1: 0.485, v0: foot, v1: 1 }, { u0: 0.515, u1: 1, v0: foot, v1: 1 }];
  hands(leaf, numbers, group, { id: "q", title: `query of head ${head}`, before: numbers.q, after: numbers.qTurned, part: leaf.isNarrow ? right : left });
  hands(leaf, numbers, group, { id: "k", title: `key of its group, ${group}`, before: numbers.k, after: numbers.kTurned, part: leaf.isNarrow ? left : right });
  const [first, last] = [frequencies[0] ?? 0, frequencies.at(-1) ?? 0];
  leaf.text("law", [0, foot], `${tokenAt(data, pos)} stands at position ${pos}: each pair turns by ${pos} times its frequency`, { size: leaf.isNarrow ? "small" : "normal", ink: "ink", shift: [0, LINE], most: leaf.size.width });
  leaf.text("ends", [0, foot], `the first by ${number(pos * first, 3)} rad, the last by ${number(pos * last, 3)} rad; pale: before`, { size: leaf.isNarrow ? "small" : "normal", shift: [0, 2 * LINE], most: leaf.size.width });
}

/** A grid of clock faces; hands are equally long, and paler where the pair is short. */
function hands(leaf: Leaf, { frequencies, pos }: RopeNumbers, hue: number, { id, title, before, after, part }: Side): void {
  const pairs = before.length / 2;
  leaf.text(`${id}.title`, [part.u0, part.v1], title, { size: "normal", ink: "ink", shift: [0, LINE / 2] });
  const v1 = part.v1 - leaf.down(LINE);
  const [wide, high] = [(part.u1 - part.u0) * leaf.size.width, (v1 - part.v0) * leaf.size.height];
  const columns = columnsFor(pairs, wide, high);
  const lines = Math.ceil(pairs / columns);
  const radius = 0.44 * Math.min(wide / columns, high / lines);
  const sizes = Array.from({ length: pairs }, (_, i) => Math.hypot(before[i] as number, before[i + pairs] as number));
  const longest = Math.max(...sizes, 1e-30);
  for (let i = 0; i < pairs; i++) {
    const [u, v] = [part.u0 + ((i % columns) + 0.5) * ((part.u1 - part.u0) / columns), v1 - (Math.floor(i / columns) + 0.5) * ((v1 - part.v0) / lines)];
    const at = leaf.at(u, v);
    const alpha = 0.45 + (0.55 * (sizes[i] as number)) / longest;
    const start = Math.atan2(before[i + pairs] as number, before[i] as number);
    const turn = pos * (frequencies[i] ?? 0);
    const pair = `pair ${i} of the ${title}`;
    leaf.add({ kind: "dot", id: `${leaf.id}.${id}${i}.face`, at, radius, ink: "soft", alpha: 0.6, outlined: true });
    leaf.add({ kind: "hand", id: `${leaf.id}.${id}${i}.before`, at, length: 0.9 * radius, angle: start, ink: "soft", alpha: 0.6 * alpha });
    leaf.add({
      kind: "hand", id: `${leaf.id}.${id}${i}.after`, at, length: 0.9 * radius, angle: start + leaf.share * turn, ink: "attention", hue, alpha, width: 2,
      says: { name: `${pair}: (${number(before[i] as number)}, ${number(before[i + pairs] as number)}) becomes (${number(after[i] as number)}, ${number(after[i + pairs] as number)}), turned by`, value: turn, unit: "rad" },
    });
  }
}

/** So many columns that cells are about as wide as high; full rows where that costs little. */
function columnsFor(count: number, wide: number, high: number): number {
  let [best, even] = [{ columns: 1, size: 0 }, { columns: 1, size: 0 }];
  for (let columns = 1; columns <= count; columns++) {
    const size = Math.min(wide / columns, high / Math.ceil(count / columns));
    if (size > best.size) best = { columns, size };
    if (count % columns === 0 && size > even.size) even = { columns, size };
  }
  return even.size >= FULL * best.size ? even.columns : best.columns;
}
