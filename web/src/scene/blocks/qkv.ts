/** Queries, keys and values of a token: three matrices, and strips by head; the heads of a group share a key and a value. */

import { limitOf } from "../../lib/colors";
import { length } from "../../lib/algebra";
import { number } from "../../lib/format";
import type { Data } from "../data/data";
import type { Leaf } from "../depths/leaf";
import type { QkvNumbers } from "../data/near";
import { productPart } from "../places/sheet";
import { lengthOf, lengthText, productPlace, rowOf, tokenAt } from "./shared";

const READABLE = 26; // pixels of a head's strip from which on it has a name above it
const [FOOT, HEAD] = [0.37, 0.99];

export function qkv(leaf: Leaf, numbers: QkvNumbers, data: Data): void {
  const { input, q, k, v, pos, layer } = numbers;
  const { N, K, H, D } = data.shape;
  leaf.row("input", [0.02, 0.13], input, { label: "normalised stream", value: lengthText(input), says: lengthOf(`normalised stream of ${tokenAt(data, pos)}, layer ${layer}`, input), cell: (_, i) => ({ name: `normalised[${i}]` }) });
  const matrices = [["q_proj", "W_q", N], ["k_proj", "W_k", K], ["v_proj", "W_v", K]] as const;
  for (const [product, name, heads] of matrices) {
    const part = productPart(product);
    const u = (part.u0 + part.u1) / 2;
    leaf.arrow(`${name}.in`, [u, 0.14], [u, part.v0], leaf.done(0, 0.3));
    leaf.matrix(name, part, name, `${heads * H} × ${D}`, productPlace(product, numbers, data), leaf.done(0, 0.4));
  }
  groups(leaf, numbers, data, { q: limitOf(q).limit, k: limitOf(k).limit, v: limitOf(v).limit });
}

/** A column of strips for each group: its queries, their key, their value. */
function groups(leaf: Leaf, numbers: QkvNumbers, data: Data, limits: Record<"q" | "k" | "v", number>): void {
  const { N, K } = data.shape;
  const columns = Math.min(K, leaf.isNarrow ? 4 : 8);
  const lines = Math.ceil(K / columns);
  const strips = N / K + 2;
  const [gap, wide, high] = [leaf.across(12), 1 / columns, (HEAD - FOOT) / lines];
  const room = (high - leaf.down(10)) / strips;
  const isNamed = room * leaf.size.height >= READABLE;
  for (let group = 0; group < K; group++) {
    const [column, line] = [group % columns, Math.floor(group / columns)];
    const [u0, u1] = [column * wide + gap / 2, (column + 1) * wide - gap / 2];
    const top = HEAD - line * high;
    leaf.box(`g${group}`, { u0: u0 - gap / 4, u1: u1 + gap / 4, v0: top - high + leaf.down(4), v1: top }, "attention", { outlined: true, corner: 5, hue: group, alpha: 0.7 * leaf.done(0.3, 0.6) });
    for (let i = 0; i < strips; i++) {
      const what = i < N / K ? "q" : i === N / K ? "k" : "v";
      const head = what === "q" ? group * (N / K) + i : group;
      const v1 = top - leaf.down(5) - i * room;
      const part = { u0: u0 + gap / 4, u1: u1 - gap / 4, v0: v1 - room + leaf.down(3), v1 };
      one(leaf, numbers, data, { what, head, part, limit: limits[what], alpha: leaf.done(0.4, 0.7 + (0.3 * i) / strips), isNamed });
    }
  }
}

interface One {
  readonly what: "q" | "k" | "v";
  readonly head: number;
  readonly part: { u0: number; v0: number; u1: number; v1: number };
  readonly limit: number;
  readonly alpha: number;
  readonly isNamed: boolean;
}

function one(leaf: Leaf, numbers: QkvNumbers, data: Data, { what, head, part, limit, alpha, isNamed }: One): void {
  const { H } = data.shape;
  const values = rowOf(numbers[what], head, H);
  const name = { q: "query", k: "key", v: "value" }[what];
  const look = {
    limit, alpha, rows: 1, says: lengthOf(`${name} of ${what === "q" ? "head" : "group"} ${head}, ${tokenAt(data, numbers.pos)}`, values),
    cell: (_: number, i: number) => ({ name: `${what}${head}[${i}]`, enter: productPlace(`${what}_proj`, numbers, data, head * H + i) }),
  };
  const isChosen = what === "q" && head === data.chosen.head;
  if (!isNamed) leaf.strip(`${what}${head}`, part, values, look);
  else leaf.captioned(`${what}${head}`, part, values, { label: `${name} ${head}`, ...(isChosen && { labelInk: "chosen" as const }), value: number(length(values), 3), ...look });
}
