/** RMSNorm: the stream, divided by the root of its mean square, multiplied with gamma. */

import { rms } from "../../lib/algebra";
import { number } from "../../lib/format";
import type { Data } from "../data/data";
import type { Leaf } from "../depths/leaf";
import type { NormNumbers } from "../data/near";
import { lengthOf, lengthText, once, tokenAt } from "./shared";

export function norm(leaf: Leaf, { before, gamma, after, eps, pos, layer, block }: NormNumbers, data: Data): void {
  const root = rms(before, eps);
  const divided = once(before, "divided", () => before.map((value) => value / root));
  const of = `${tokenAt(data, pos)}, layer ${layer}`;
  const strip = leaf.isNarrow ? 0.5 : 0.2;
  const cell = (name: string) => (_: number, i: number) => ({ name: `${name}[${i}] of ${of}` });
  leaf.row("before", [0.03, 0.17], before, { label: "x, the stream", value: lengthText(before), says: lengthOf(`x: the stream before the ${block === "norm" ? "attention" : "MLP"} of ${of}`, before), cell: cell("x") });
  leaf.arrow("divide", [strip, 0.18], [strip, 0.33], leaf.done(0, 0.3));
  leaf.text("root", [strip, 0.255], `÷ ${number(root)}, the root of the mean of x²`, {
    size: leaf.isNarrow ? "normal" : "large", ink: "ink", align: leaf.isNarrow ? "center" : "left", shift: leaf.isNarrow ? [0, 0] : [14, 0], alpha: leaf.done(0, 0.3),
    says: { name: `root mean square of ${of}`, value: root },
  });
  leaf.row("divided", [0.34, 0.48], divided, { label: "x ÷ root", says: lengthOf(`x divided by its root mean square, ${of}`, divided), value: lengthText(divided), cell: cell("x / root"), alpha: leaf.done(0.2, 0.5) });
  leaf.row("gamma", [0.54, 0.68], gamma, { label: "× γ, learned", says: lengthOf(`gamma of layer ${layer}`, gamma), value: lengthText(gamma), cell: (_, i) => ({ name: `gamma[${i}] of layer ${layer}` }), alpha: leaf.done(0.4, 0.7) });
  leaf.arrow("result", [strip, 0.69], [strip, 0.79], leaf.done(0.6, 0.9));
  leaf.row("after", [0.8, 0.95], after, { label: "normalised", says: lengthOf(`normalised stream of ${of}`, after), value: lengthText(after), cell: cell("normalised"), alpha: leaf.done(0.7, 1) });
}
