/** The MLP: gate and up, SiLU of the gate times up, and down; the strongest neurons one by one. */

import { length } from "../../lib/algebra";
import { number } from "../../lib/format";
import type { Data } from "../data/data";
import type { Leaf } from "../depths/leaf";
import type { MlpNumbers } from "../data/near";
import { productPart } from "../places/sheet";
import { lengthOf, lengthText, productPlace, tokenAt } from "./shared";

const HALVES = [{ u0: 0.02, u1: 0.47 }, { u0: 0.53, u1: 0.98 }] as const;

export function mlp(leaf: Leaf, numbers: MlpNumbers, data: Data): void {
  const { input, gate, act, up, gated, out, pos, layer } = numbers;
  const { D, F } = data.shape;
  const of = `${tokenAt(data, pos)}, layer ${layer}`;
  const cell = (name: string, product?: "gate_proj" | "up_proj" | "down_proj") => (_: number, i: number) => ({ name: `${name}[${i}]`, ...(product && { enter: productPlace(product, numbers, data, i) }) });
  leaf.row("input", [0.01, 0.1], input, { label: "normalised stream", value: lengthText(input), says: lengthOf(`normalised stream of ${of}`, input), cell: cell("normalised") });
  for (const [i, [product, name]] of ([["gate_proj", "W_gate"], ["up_proj", "W_up"]] as const).entries()) {
    const u = i ? 0.755 : 0.245;
    leaf.arrow(`${name}.in`, [u, 0.105], [u, productPart(product).v0]);
    leaf.matrix(name, productPart(product), name, `${F} × ${D}`, productPlace(product, numbers, data));
  }
  leaf.captioned("gate", { ...HALVES[0], v0: 0.25, v1: 0.36 }, gate, { label: "gate", value: number(length(gate), 3), alpha: leaf.done(0.1, 0.3), says: lengthOf(`gate of ${of}`, gate), cell: cell("gate", "gate_proj") });
  leaf.captioned("up", { ...HALVES[1], v0: 0.25, v1: 0.36 }, up, { label: "up", value: number(length(up), 3), alpha: leaf.done(0.1, 0.3), says: lengthOf(`up of ${of}`, up), cell: cell("up", "up_proj") });
  leaf.captioned("act", { ...HALVES[0], v0: 0.375, v1: 0.485 }, act, { label: leaf.isNarrow ? "SiLU(gate)" : "SiLU(gate): what passes", value: number(length(act), 3), alpha: leaf.done(0.3, 0.5), says: lengthOf(`SiLU(gate) of ${of}`, act), cell: cell("SiLU(gate)") });
  leaf.arrow("by", [0.755, 0.365], [0.755, 0.495], leaf.done(0.3, 0.5));
  leaf.text("times", [0.755, 0.43], "×", { size: "title", ink: "ink", shift: [10, 0], alpha: leaf.done(0.3, 0.5) });
  leaf.captioned("gated", { u0: 0.02, u1: 0.98, v0: 0.5, v1: 0.595 }, gated, { label: "SiLU(gate) × up, neuron by neuron", value: number(length(gated), 3), alpha: leaf.done(0.4, 0.6), says: lengthOf(`SiLU(gate) × up of ${of}`, gated), cell: cell("product") });
  neurons(leaf, numbers, data);
  const down = productPart("down_proj");
  leaf.matrix("W_down", down, "W_down", `${D} × ${F}`, productPlace("down_proj", numbers, data), leaf.done(0.6, 0.8));
  leaf.row("out", [0.895, 0.985], out, { label: "added to the stream", value: lengthText(out), alpha: leaf.done(0.8, 1), says: lengthOf(`what the MLP adds to ${of}`, out), cell: cell("MLP adds", "down_proj") });
}

/** Columns of bars around a line: the neurons whose product is largest. */
function neurons(leaf: Leaf, numbers: MlpNumbers, data: Data): void {
  const most = leaf.isNarrow ? 5 : 10;
  const shown = numbers.neurons.slice(0, most);
  const largest = Math.max(...shown.map((one) => Math.abs(one.gated)), 1e-30);
  const [v0, v1] = [0.61, 0.77];
  const [zero, step] = [(v0 + v1) / 2, 0.96 / most];
  const reach = (v1 - v0) / 2 - leaf.down(3);
  leaf.line("neurons.zero", [[0.02, zero], [0.98, zero]], "line", 1, leaf.done(0.5, 0.7));
  for (const [i, one] of shown.entries()) {
    const u = 0.02 + i * step;
    const end = zero + (reach * one.gated * leaf.done(0.5, 0.75)) / largest;
    const alpha = leaf.done(0.5, 0.7);
    leaf.box(`n${one.index}`, { u0: u, u1: u + 0.22 * step, v0: Math.min(zero, end), v1: Math.max(zero, end) }, one.gated < 0 ? "negative" : "positive", {
      alpha, says: { name: `neuron ${one.index} of ${tokenAt(data, numbers.pos)}: SiLU(${number(one.gate)}) = ${number(one.act)}, times ${number(one.up)}, is`, value: one.gated }, enter: productPlace("gate_proj", numbers, data, one.index),
    });
    const room = 0.74 * step * leaf.size.width;
    leaf.text(`n${one.index}.name`, [u + 0.26 * step, zero], `n ${one.index}`, { shift: [0, -8], most: room, alpha });
    leaf.text(`n${one.index}.value`, [u + 0.26 * step, zero], number(one.gated, 3), { mono: true, ink: "ink", shift: [0, 8], most: room, alpha });
  }
}
