/**
 * Depth 1: one layer of all tokens. What the far view draws at a height stands at the same height: the stream, attention's curves, by head now,
 * and what the MLP adds; between them norm, queries, keys and values, the rotation, and the two sums.
 */

import { number, visible } from "../../lib/format";
import type { Camera } from "../places/camera";
import type { Data, Moment } from "../data/data";
import type { DepthScene } from "./depth";
import { blockStrength, layerNearness } from "./entered";
import { frameOf, STEPS, SUM_OF_ATTENTION, SUM_OF_MLP } from "../places/layout";
import { SIZES, widthOf } from "../marks/look";
import type { Mark, Point, Rect } from "../marks/marks";
import type { LayerNumbers } from "../data/near";
import type { Block, Place } from "../places/place";
import { halfWidth } from "./whole";

const LEAST = { chosen: 0.004, other: 0.03 } as const; // shares that are drawn, of the chosen head and of others
const CROWDED = 12; // tokens
const MOST_CURVES = 1200; // of the other heads: the strongest
const [LEFT, MIDDLE, RIGHT] = [0.11, 0.275, 0.44] as const; // beside the stream: where the way through the blocks runs

/** How a step is called beside the picture; the second where the picture is turned, and there is little room. */
const NAMES: readonly (readonly [y: number, name: string, short: string])[] = [
  [middle("norm"), "norm", "norm"], [middle("qkv"), "q k v", "qkv"], [middle("rope"), "RoPE", "RoPE"], [middle("attention"), "attention", "attn"],
  [middle("heads"), "heads", "heads"], [middle("mlp_norm"), "norm", "norm"], [middle("mlp"), "MLP", "MLP"],
];

function middle(block: keyof typeof STEPS): number {
  return (STEPS[block][0] + STEPS[block][1]) / 2;
}

interface Drawn {
  readonly data: Data;
  readonly numbers: LayerNumbers;
  /** Pixels of a column and of a layer, where the layer fills the picture. */
  readonly sx: number;
  readonly sy: number;
  /** What the picture shows of the world then. */
  readonly frame: Rect;
  readonly turned: boolean;
}

interface Placed {
  readonly mark: Mark;
  readonly column: number;
  readonly y: number;
}

const named = ({ data }: Drawn, pos: number): string => `“${data.tokens[pos]?.text ?? ""}”`;

const enter = ({ data, numbers }: Drawn, pos: number, block: Block, head = data.chosen.head): Place => ({ depth: 2, pos, layer: numbers.layer, head, block });

function* streams(drawn: Drawn, t: number): Generator<Placed> {
  const { numbers } = drawn;
  const { layer: l } = numbers;
  const x = numbers.start + t;
  const [before, mid, after] = [numbers.before[t] as number, numbers.middle[t] as number, numbers.after[t] as number];
  const parts = [
    ["before", 0, SUM_OF_ATTENTION, before, before, before, `before layer ${l}`], ["middle", SUM_OF_ATTENTION, SUM_OF_MLP, mid, mid, mid, `between attention and MLP of layer ${l}`],
    ["after", SUM_OF_MLP, 1, after, after, after, `after layer ${l}`],
  ] as const;
  for (const [id, from, to, a, b, value, what] of parts) {
    const [wa, wb] = [halfWidth(a), halfWidth(b)];
    const points: Point[] = [[x - wa, l + from], [x + wa, l + from], [x + wb, l + to], [x - wb, l + to]];
    yield { column: x, y: l + from, mark: { kind: "area", id: `n.t${x}.${id}`, points, ink: "stream", says: { name: `stream of ${named(drawn, x)} ${what}`, value, unit: "length" } } };
  }
}

/** A token's way through the layer: out of the stream, through the blocks, back into it, twice. */
function* way(drawn: Drawn, t: number): Generator<Placed> {
  const { numbers } = drawn;
  const { layer: l } = numbers;
  const x = numbers.start + t;
  const halves = [
    { id: "a", from: 0, to: SUM_OF_ATTENTION, added: numbers.attention[t] as number, stream: numbers.middle[t] as number, what: "attention", ink: "attention", at: middle("heads"), block: "heads" },
    { id: "m", from: SUM_OF_ATTENTION, to: SUM_OF_MLP, added: numbers.mlp[t] as number, stream: numbers.after[t] as number, what: "the MLP", ink: "mlp", at: middle("mlp"), block: "mlp" },
  ] as const;
  for (const { id, from, to, added, stream, what, ink, at, block } of halves) {
    const path: Point[] = [[x, l + from + 0.005], [x + MIDDLE, l + from + 0.02], [x + MIDDLE, l + to - 0.02], [x, l + to]];
    yield { column: x, y: l + from, mark: { kind: "line", id: `n.t${x}.${id}.way`, points: path, ink: "soft", width: 1, alpha: 0.6 } };
    const [root, normBlock] = id === "a" ? ([numbers.rms[t] as number, "norm"] as const) : ([numbers.middleRms[t] as number, "mlp_norm"] as const);
    yield* pill(drawn, x, `${id}.norm`, normBlock, root, `root mean square of ${named(drawn, x)} before ${what} of layer ${l}`);
    const most = Math.min(13, 0.15 * drawn.sx, 0.035 * drawn.sy + 4);
    const says = { name: `${what} of layer ${l} adds to ${named(drawn, x)}: length ${number(added)}, for the stream's`, value: added / stream, unit: "share" };
    yield { column: x, y: l + at, mark: { kind: "dot", id: `n.t${x}.${id}.adds`, at: [x + MIDDLE, l + at], radius: 2 + most * Math.sqrt(Math.min(1, added / stream)), ink, says, enter: enter(drawn, x, block) } };
    yield { column: x, y: l + to, mark: { kind: "dot", id: `n.t${x}.${id}.sum`, at: [x, l + to], radius: 6, ink: "panel" } };
    yield { column: x, y: l + to, mark: { kind: "dot", id: `n.t${x}.${id}.sum.ring`, at: [x, l + to], radius: 6, ink, outlined: true } };
    yield { column: x, y: l + to, mark: { kind: "text", id: `n.t${x}.${id}.plus`, at: [x, l + to], text: "+", size: "small", align: "center", ink: "ink" } };
  }
}

function* pill(drawn: Drawn, x: number, id: string, block: "norm" | "mlp_norm", root: number, name: string): Generator<Placed> {
  const { layer: l } = drawn.numbers;
  const [y0, y1] = [l + STEPS[block][0] + 0.012, l + STEPS[block][1] - 0.005];
  const rect = { x0: x + LEFT, x1: x + RIGHT, y0, y1 };
  yield { column: x, y: y0, mark: { kind: "box", id: `n.t${x}.${id}.room`, rect, ink: "panel", corner: 4 } };
  yield { column: x, y: y0, mark: { kind: "box", id: `n.t${x}.${id}`, rect, ink: "soft", outlined: true, corner: 4, says: { name, value: root }, enter: enter(drawn, x, block) } };
  const text = `÷${number(root, 2)}`;
  const room = (drawn.turned ? (y1 - y0) * drawn.sy : (RIGHT - LEFT) * drawn.sx) - 2;
  if (widthOf(text, "small", true) > room || (drawn.turned ? (RIGHT - LEFT) * drawn.sx : (y1 - y0) * drawn.sy) < SIZES.small + 2) return;
  yield { column: x, y: y0, mark: { kind: "text", id: `n.t${x}.${id}.text`, at: [x + MIDDLE, (y0 + y1) / 2], text, size: "small", mono: true, align: "center", ink: "ink" } };
}

/** Lengths of queries by head, keys and values by group, and the hand that the rotation turns. */
function* projected(drawn: Drawn, t: number): Generator<Placed> {
  const { data, numbers } = drawn;
  const { N, K } = data.shape;
  const x = numbers.start + t;
  const [y0, y1] = [numbers.layer + STEPS.qkv[0], numbers.layer + STEPS.qkv[1]];
  const strips = [["q", numbers.queries, N, "head"], ["k", numbers.keys, K, "group"], ["v", numbers.values, K, "group"]] as const;
  for (const [i, [what, values, count, of]] of strips.entries()) {
    const rect = drawn.turned
      ? { x0: x + LEFT, x1: x + RIGHT, y0: y0 + ((y1 - y0) * i) / 3, y1: y0 + ((y1 - y0) * (i + 0.82)) / 3 }
      : { x0: x + LEFT, x1: x + RIGHT, y0: y1 - ((y1 - y0) * (i + 0.82)) / 3, y1: y1 - ((y1 - y0) * i) / 3 };
    const [rows, columns] = drawn.turned ? [count, 1] : [1, count];
    yield {
      column: x, y: y0,
      mark: {
        kind: "cells", id: `n.t${x}.${what}`, rect, rows, columns, values: values.subarray(t * count, (t + 1) * count), scale: "share", limit: largest(values),
        says: { name: `${what} of ${named(drawn, x)} in layer ${numbers.layer}: length by ${of}, the largest`, value: largest(values.subarray(t * count, (t + 1) * count)), unit: "length" },
        cell: (row, column) => ({ name: `length of ${what} of ${of} ${row + column}, ${named(drawn, x)}`, enter: enter(drawn, x, "qkv", what === "q" ? row + column : data.chosen.head) }),
        enter: enter(drawn, x, "qkv"),
      },
    };
  }
  const at: Point = [x + MIDDLE, numbers.layer + middle("rope")];
  const radius = Math.min(14, 0.13 * drawn.sx, 0.036 * drawn.sy);
  const says = { name: `RoPE turns the first pair of ${named(drawn, x)} by position ${x} times its frequency`, value: x * numbers.frequency, unit: "rad" };
  yield { column: x, y: at[1], mark: { kind: "dot", id: `n.t${x}.face`, at, radius, ink: "panel" } };
  yield { column: x, y: at[1], mark: { kind: "dot", id: `n.t${x}.face.ring`, at, radius, ink: "soft", outlined: true, says, enter: enter(drawn, x, "rope") } };
  yield { column: x, y: at[1], mark: { kind: "hand", id: `n.t${x}.hand`, at, length: 0.85 * radius, angle: x * numbers.frequency, ink: "ink" } };
}

const largest = (values: Float32Array): number => values.reduce((most, value) => Math.max(most, value), 1e-30);

interface Look {
  readonly head: number;
  readonly query: number;
  readonly key: number;
  readonly share: number;
}

/** What is drawn of attention: all of the chosen head, and the strongest of the others but the sink. */
export function looks({ pattern, start, count, sources }: LayerNumbers, heads: number, chosen: number): Look[] {
  const [mine, others]: [Look[], Look[]] = [[], []];
  for (let head = 0; head < heads; head++) {
    for (let t = 0; t < count; t++) {
      for (let key = start; key < start + t; key++) {
        const share = pattern[(head * count + t) * sources + key] as number;
        const one = { head, query: start + t, key, share };
        if (head === chosen && share >= LEAST.chosen) mine.push(one);
        else if (head !== chosen && key > 0 && share >= LEAST.other) others.push(one);
      }
    }
  }
  const strongest = others.length > MOST_CURVES ? others.toSorted((a, b) => b.share - a.share).slice(0, MOST_CURVES) : others;
  return [...strongest, ...mine];
}

function* attention(drawn: Drawn): Generator<Placed> {
  const { data, numbers } = drawn;
  const { N, K } = data.shape;
  const { layer: l } = numbers;
  const [y0, y1] = [l + STEPS.qkv[1], l + STEPS.attention[1] - 0.02];
  const isCrowded = numbers.count > CROWDED; // then the chosen token's curves stand out, on top
  const all = looks(numbers, N, data.chosen.head);
  const [mine, others] = [all.filter((one) => one.query === data.chosen.pos), all.filter((one) => one.query !== data.chosen.pos)];
  for (const { head, query, key, share } of [...others, ...mine]) {
    const isChosen = head === data.chosen.head;
    const [from, to] = [key + RIGHT, query + MIDDLE];
    const bend = 0.45 * (to - from);
    const alpha = (isChosen ? Math.min(0.95, 0.25 + share) * (key === 0 ? 0.45 : 1) : 0.06 + 0.2 * share) * (isCrowded && query !== data.chosen.pos ? 0.3 : 1);
    yield {
      column: query, y: y1,
      mark: {
        kind: "curve", id: `n.h${head}.q${query}.k${key}`, ink: "attention", hue: Math.floor((head * K) / N), width: (isChosen ? 1 : 0.6) + 7 * share, alpha,
        points: [[from, y0], [from + bend, y0 + 0.03], [to - bend, y1], [to, y1]],
        says: { name: `layer ${l}, head ${head}: ${named(drawn, query)} takes from ${named(drawn, key)}`, value: share, unit: "share" }, enter: enter(drawn, query, "attention", head),
      },
    };
  }
  for (let t = 0; t < numbers.count; t++) {
    const x = numbers.start + t;
    const share = numbers.pattern[(data.chosen.head * numbers.count + t) * numbers.sources + x] as number;
    const says = { name: `layer ${l}, head ${data.chosen.head}: ${named(drawn, x)} takes from itself`, value: share, unit: "share" };
    const at: Point = [x + MIDDLE, y1];
    yield { column: x, y: y1, mark: { kind: "dot", id: `n.h${data.chosen.head}.q${x}.k${x}`, at, radius: 3 + 5 * share, ink: "attention", hue: Math.floor((data.chosen.head * K) / N), says, enter: enter(drawn, x, "attention") } };
  }
}

function* labels(drawn: Drawn): Generator<Placed> {
  const { data, numbers, turned, sx, sy } = drawn;
  const { layer: l, start, count } = numbers;
  const lines = sx >= 56 ? 1 : sx >= 34 ? 2 : 3; // in which names stand
  // The steps' names stand at the picture's edge, also where that is among the columns.
  const { x0 } = drawn.frame;
  const wide = turned ? 30 : 64;
  for (let t = 0; t < count; t++) {
    const x = start + t;
    const isChosen = x === data.chosen.pos;
    const mark = { kind: "text", id: `n.t${x}.name`, text: visible(data.tokens[x]?.text), size: "small", ink: isChosen ? "chosen" : "soft", mono: true } as const;
    if (!turned) yield { column: -1, y: l, mark: { ...mark, at: [x, l - 0.015], align: "center", most: lines * sx - 4, shift: [0, (lines === 1 ? 8 : 4) + 8.5 * (t % lines)] } };
    else if ((x - 0.28 - x0) * sx > wide + 6) yield { column: -1, y: l, mark: { ...mark, at: [x - 0.28, l - 0.07], align: "left", most: 0.15 * sy } };
  }
  if (x0 > start - 0.5) yield { column: -1, y: l, mark: { kind: "box", id: "n.names", rect: { x0, x1: x0 + wide / sx, y0: l - 0.08, y1: l + 1.08 }, ink: "panel", alpha: 0.85 } };
  for (const [i, [y, name, short]] of NAMES.entries()) {
    const at: Point = [x0, l + y];
    if (turned) yield { column: -1, y: l, mark: { kind: "text", id: `n.step${i}`, at, text: short, size: "small", align: "center", ink: "soft", shift: [0, i % 2 ? 8 : 21] } };
    else yield { column: -1, y: l, mark: { kind: "text", id: `n.step${i}`, at, text: name, size: "small", align: "left", ink: "soft", shift: [4, 0] } };
  }
}

function build(drawn: Drawn): Placed[] {
  const tokens = Array.from({ length: drawn.numbers.count }, (_, t) => t);
  return [
    ...tokens.flatMap((t) => [...streams(drawn, t)]), ...attention(drawn), ...tokens.flatMap((t) => [...way(drawn, t)]),
    ...tokens.flatMap((t) => [...projected(drawn, t)]), ...labels(drawn),
  ];
}

interface Built {
  readonly key: string;
  readonly all: readonly Placed[];
  readonly marks: readonly Mark[];
}

const made = new WeakMap<LayerNumbers, Built>();

/** The marks of a layer: they depend on the picture's size and on what is chosen, and not on the zoom. */
function builtOf(data: Data, numbers: LayerNumbers, camera: Camera): Built {
  const { size, turned } = camera;
  const key = [size.width, size.height, turned, data.chosen.pos, data.chosen.head].join();
  const known = made.get(numbers);
  if (known?.key === key) return known;
  const frame = frameOf({ depth: 1, pos: data.chosen.pos, layer: numbers.layer, head: 0 }, data.extent, turned);
  const all = build({ data, numbers, turned, frame, sx: (turned ? size.height : size.width) / (frame.x1 - frame.x0), sy: (turned ? size.width : size.height) / 1.16 });
  const built = { key, all, marks: all.map(({ mark }) => mark) };
  made.set(numbers, built);
  return built;
}

function marks(data: Data, camera: Camera, moment: Moment): readonly Mark[] {
  const numbers = data.near?.layer;
  if (!numbers) return [];
  const built = builtOf(data, numbers, camera);
  if (moment.from === Infinity || moment.height >= numbers.layer + 1) return built.marks;
  return built.all.filter(({ column, y }) => column < moment.from || y <= moment.height).map(({ mark }) => mark);
}

export const layer: DepthScene = {
  name: "layer",
  strength: (data, camera) => layerNearness(data, camera) * (1 - blockStrength(data, camera)),
  marks,
};
