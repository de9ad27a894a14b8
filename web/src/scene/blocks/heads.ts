/** The heads side by side, through o_proj: each adds a vector of its own, and the stream gets the sum. */

import { limitOf } from "../../lib/colors";
import { number, percent } from "../../lib/format";
import type { Data } from "../data/data";
import type { Leaf } from "../depths/leaf";
import type { HeadsNumbers } from "../data/near";
import { productPart } from "../places/sheet";
import { lengthOf, lengthText, productPlace, rowOf, tokenAt } from "./shared";

const READABLE = 13;
const [FOOT, HEAD] = [0.33, 0.86];

export function heads(leaf: Leaf, numbers: HeadsNumbers, data: Data): void {
  const { gathered, out, pos, layer, rounding } = numbers;
  const { N, K, H, D } = data.shape;
  leaf.row("gathered", [0.02, 0.12], gathered, { label: "heads side by side", value: lengthText(gathered), says: lengthOf(`what the ${N} heads have gathered for ${tokenAt(data, pos)}`, gathered), cell: (_, i) => ({ name: `head ${Math.floor(i / H)}[${i % H}]` }) });
  const part = productPart("o_proj");
  leaf.arrow("in", [0.5, 0.125], [0.5, part.v0]);
  leaf.matrix("W_o", part, "W_o", `${D} × ${N * H}`, productPlace("o_proj", numbers, data));
  leaf.arrow("each", [0.5, part.v1], [0.5, FOOT], leaf.done(0, 0.2));
  const step = (HEAD - FOOT) / N;
  const most = Math.max(...numbers.shares.map(Math.abs), 1e-9);
  for (let head = 0; head < N; head++) {
    const v1 = HEAD - head * step;
    one(leaf, numbers, data, { head, most, hue: Math.floor((head * K) / N), v0: v1 - 0.85 * step, v1, alpha: leaf.done((0.7 * head) / N, (0.7 * (head + 1)) / N + 0.1) });
  }
  const off = rounding > 0.01 * Math.hypot(...numbers.norms) ? `, but for rounding of length ${number(rounding, 2)}` : "";
  leaf.row("out", [0.89, 0.985], out, {
    label: "their sum", value: lengthText(out), alpha: leaf.done(0.8, 1), says: lengthOf(`what attention adds to ${tokenAt(data, pos)} in layer ${layer}: the heads' sum${off}`, out),
    cell: (_, i) => ({ name: `attention adds [${i}]`, enter: productPlace("o_proj", numbers, data, i) }),
  });
}

interface One {
  readonly head: number;
  readonly hue: number;
  /** The largest share, of either sign. */
  readonly most: number;
  readonly v0: number;
  readonly v1: number;
  readonly alpha: number;
}

function one(leaf: Leaf, { added, norms, shares, out, pos }: HeadsNumbers, data: Data, { head, hue, most, v0, v1, alpha }: One): void {
  const { D } = data.shape;
  const [strip, bar] = leaf.isNarrow ? [[0.16, 0.82], undefined] : [[0.2, 0.72], 0.8];
  const middle = (v0 + v1) / 2;
  const isChosen = head === data.chosen.head;
  const isNamed = (v1 - v0) * leaf.size.height >= READABLE;
  const share = shares[head] as number;
  leaf.box(`h${head}.hue`, { u0: (strip[0] as number) - leaf.across(7), u1: (strip[0] as number) - leaf.across(2), v0, v1 }, "attention", { hue, alpha });
  leaf.strip(`h${head}`, { u0: strip[0] as number, u1: strip[1] as number, v0, v1 }, rowOf(added, head, D), {
    limit: limitOf(out).limit, alpha, rows: 1, says: { name: `head ${head} adds to ${tokenAt(data, pos)}`, value: norms[head] as number, unit: "length" }, cell: (_, i) => ({ name: `head ${head} adds [${i}]` }),
  });
  if (bar !== undefined) {
    const end = bar + (0.065 * share) / most;
    leaf.box(`h${head}.share`, { u0: Math.min(bar, end), u1: Math.max(bar, end), v0, v1 }, share < 0 ? "negative" : "positive", { alpha, says: { name: `share of head ${head} in the sum, along it`, value: share, unit: "share" } });
  }
  if (!isNamed) return;
  leaf.text(`h${head}.name`, [0, middle], leaf.isNarrow ? `h ${head}` : `head ${head}`, { size: leaf.isNarrow ? "small" : "normal", ink: isChosen ? "chosen" : "soft", alpha, most: 0.13 * leaf.size.width });
  leaf.text(`h${head}.value`, [1, middle], percent(share, leaf.isNarrow ? 0 : 1).replace("-", "−"), { size: leaf.isNarrow ? "small" : "normal", align: "right", mono: true, ink: "ink", alpha, most: 0.14 * leaf.size.width });
}
