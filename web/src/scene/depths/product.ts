/** Depth 3: a product as matrix and vector. The rows around the one that is looked at, where its largest terms are; what goes in, what comes out. */

import { limitOf } from "../../lib/colors";
import { count, number } from "../../lib/format";
import { around, type Window } from "../../lib/window";
import { productPlace, tokenAt } from "../blocks/shared";
import type { Camera } from "../places/camera";
import type { Data, Moment } from "../data/data";
import type { DepthScene } from "./depth";
import { productPlaces, productStrength } from "./entered";
import { Leaf } from "./leaf";
import type { Mark } from "../marks/marks";
import type { ProductNumbers } from "../data/near";
import { termsOf } from "./number";
import { Once } from "../marks/once";
import type { Product } from "../places/place";
import { NUMBER } from "../places/sheet";

const CELL = 4; // pixels of a weight, at least
const CODES = 16; // that are written out on a wide page

export const MATRIX_NAMES: Readonly<Record<Product, string>> = {
  q_proj: "W_q", k_proj: "W_k", v_proj: "W_v", o_proj: "W_o", gate_proj: "W_gate", up_proj: "W_up", down_proj: "W_down", lm_head: "lm_head", embed_tokens: "table",
};

/** The columns that are drawn: those around the row's largest term, as many as can be seen. */
function windowOf(numbers: ProductNumbers, wide: number): Window {
  const { input, columns } = numbers;
  const most = Math.max(8, Math.min(columns, Math.floor(wide / CELL)));
  return around(input ? (termsOf(numbers).terms[0]?.index ?? 0) : 0, columns, most);
}

function fill(leaf: Leaf, numbers: ProductNumbers, data: Data): void {
  const { product, weights, columns, first, of, input, output, row, pos } = numbers;
  const [right, name] = [leaf.isNarrow ? 0.74 : 0.8, MATRIX_NAMES[product]];
  const rows = weights.length / columns;
  const shown = windowOf(numbers, right * leaf.size.width);
  const size = shown.stop - shown.start;
  const cut = Float32Array.from({ length: rows * size }, (_, i) => weights[Math.floor(i / size) * columns + shown.start + (i % size)] as number);
  const [v0, v1] = [0.32, 0.8];
  const high = (v1 - v0) / rows;
  const edge = (at: number): number => v1 - (at - first) * high;
  leaf.text("title", [0, 0.99], `${name}: rows ${count(first)} to ${count(first + rows - 1)} of ${count(of)}, columns ${shown.start} to ${shown.stop - 1} of ${count(columns)}`, { size: leaf.isNarrow ? "small" : "normal", ink: "ink", shift: [0, 8], most: leaf.size.width });
  if (input) {
    leaf.strip("input", { u0: 0, u1: right, v0: 0.84, v1: 0.91 }, input.subarray(shown.start, shown.stop), { rows: 1, limit: limitOf(input).limit, says: { name: `input of ${name} at ${tokenAt(data, pos)}`, value: `${size} of ${columns} numbers` }, cell: (_, i) => ({ name: `input[${shown.start + i}]` }) });
    leaf.text("input.name", [right, 0.875], leaf.isNarrow ? "x" : "x, the input", { shift: [8, 0], size: "normal" });
  }
  const enter = (each: number) => productPlace(product, numbers, data, each);
  leaf.add({
    kind: "cells", id: `${leaf.id}.weights`, rect: leaf.part({ u0: 0, u1: right, v0, v1 }), rows, columns: size, values: cut, scale: "signed", limit: limitOf(weights).limit,
    says: { name: `weights of ${name}`, value: `${rows} × ${size} of ${of} × ${columns}` }, cell: (r, c) => ({ name: `${name}[${first + r}, ${shown.start + c}]`, enter: enter(first + r) }),
  });
  leaf.box("mine", { u0: 0, u1: right, v0: edge(row + 1), v1: edge(row) }, "chosen", { outlined: true });
  const [u0, u1] = [right + 0.03, right + (leaf.isNarrow ? 0.1 : 0.07)];
  if (input) {
    leaf.strip("output", { u0, u1, v0, v1 }, output, { rows, limit: limitOf(output).limit, says: { name: `output of ${name} at ${tokenAt(data, pos)}, rows ${first} to ${first + rows - 1}`, value: `${rows} of ${of} numbers` }, cell: (_, i) => ({ name: `output[${first + i}]`, enter: enter(first + i) }) });
    leaf.box("mine.output", { u0, u1, v0: edge(row + 1), v1: edge(row) }, "chosen", { outlined: true });
    leaf.text("output.name", [leaf.isNarrow ? 1 : u0, v1], leaf.isNarrow ? "W x" : "W x, the output", { size: "normal", align: leaf.isNarrow ? "right" : "left", shift: [0, -10], most: (1 - u0) * leaf.size.width });
    leaf.text("output.value", [u1, (edge(row) + edge(row + 1)) / 2], number(output[row - first] as number, leaf.isNarrow ? 3 : 4), { mono: true, ink: "chosen", shift: [6, 0], size: leaf.isNarrow ? "small" : "normal" });
  }
  result(leaf, numbers, data);
  codes(leaf, numbers);
}

/** The frame of the number, which can be entered. */
function result(leaf: Leaf, numbers: ProductNumbers, data: Data): void {
  const { product, row, input, output, first, pos } = numbers;
  const name = MATRIX_NAMES[product];
  const middle = [(NUMBER.u0 + NUMBER.u1) / 2, (NUMBER.v0 + NUMBER.v1) / 2] as const;
  const value = output[row - first] as number;
  const most = (NUMBER.u1 - NUMBER.u0) * leaf.size.width - 10;
  leaf.box("number", NUMBER, "soft", { outlined: true, corner: 5, enter: productPlace(product, numbers, data, row), ...(input && { says: { name: `row ${row} of ${name} times x, at ${tokenAt(data, pos)}`, value } }) });
  leaf.text("number.name", middle, input ? `row ${count(row)} · x` : `row ${count(row)} is taken`, { align: "center", shift: [0, -12], size: "normal", most });
  leaf.text("number.value", middle, input ? `= ${number(value, 5)}` : "no multiplication", { align: "center", shift: [0, 12], size: input ? "large" : "normal", mono: !!input, ink: "ink", most });
}

/** The row's first codes where the matrix is packed: code, and what it means. */
function codes(leaf: Leaf, { codes: told, row, type }: ProductNumbers): void {
  const [left, right] = [0, NUMBER.u0 - 0.03];
  if (!told) {
    leaf.text("plain", [left, 0.13], type ? `stored as ${type}` : "", { most: (right - left) * leaf.size.width });
    return;
  }
  const shown = told.weights.slice(0, leaf.isNarrow ? 8 : CODES);
  const step = (right - left) / shown.length;
  leaf.text("codes.title", [left, 0.26], leaf.isNarrow ? `${told.type_name}: codes` : `${told.type_name}: codes of row ${count(row)} from column ${told.start}`, { shift: [0, 4], most: (right - left) * leaf.size.width });
  for (const [i, one] of shown.entries()) {
    const u = left + (i + 0.5) * step;
    leaf.text(`code${i}`, [u, 0.185], String(one.code), {
      align: "center", mono: true, ink: "ink", size: "small",
      says: { name: `weight ${told.start + i} of row ${row}: code ${one.code}, level ${number(one.level)}, scale ${number(one.scale)}${one.minimum === null ? "" : `, minimum ${number(one.minimum)}`}; it means`, value: one.value },
    });
  }
  leaf.strip("means", { u0: left, u1: right, v0: 0.09, v1: 0.15 }, Float32Array.from(shown, (one) => one.value), { rows: 1, cell: (_, i) => ({ name: `weight ${told.start + i} means` }) });
  const scale = shown[0];
  if (scale) leaf.text("scale", [left, 0.03], `scale ${number(scale.scale, 3)}${scale.minimum === null ? "" : `, minimum ${number(scale.minimum, 3)}`}`, { mono: true, most: (right - left) * leaf.size.width });
}

const kept = new Once();

function marks(data: Data, camera: Camera, _: Moment): readonly Mark[] {
  const [numbers, places] = [data.near?.product, productPlaces(data, camera.turned)];
  if (!numbers || !places) return [];
  return kept.of(numbers, data, camera, 1, () => {
    const leaf = new Leaf("p", places.matrix, camera);
    fill(leaf, numbers, data);
    return leaf.marks;
  });
}

export const product: DepthScene = { name: "product", strength: productStrength, marks };
