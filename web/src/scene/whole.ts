/** Depth 0: the whole pass. Streams rise through the layers, curves are what attention brings, dots what the MLPs add, words what the lens reads. */

import { scaleOf, type Camera } from "./camera";
import { columnOf, columnsBefore, middleOf, pairOf, REST, tokenOf, type Data, type Far, type Moment } from "./data";
import { fade, type DepthScene } from "./depth";
import { blockStrength } from "./entered";
import { footOf, SUM_OF_ATTENTION, SUM_OF_MLP, topOf } from "./layout";
import { widthOf } from "./look";
import type { Mark, Point } from "./marks";
import type { Place } from "./place";

/** A thread of attention that is thinner is not drawn; the table of a layer has all of them. */
const LEAST_SHARE = 0.06;
const NEAR = [70, 150] as const; // pixels of a layer between which the far view fades out
const EVERY = 5; // layers with a rule and a number
const BOXED = 52; // pixels of a column in which a token has a box

/** A mark with what it belongs to: marks that lie outside of the camera, or that the pass has not reached, are left out by it. */
interface Placed {
  readonly mark: Mark;
  readonly column: number;
  /** From which column on it has to be seen, for what spans some. */
  readonly first: number;
  readonly y: number;
}

/** What of the camera marks depend on, in steps: within a step the same marks are painted elsewhere. */
interface Detail {
  readonly sx: number;
  readonly sy: number;
  readonly turned: boolean;
}

export const halfWidth = (length: number): number => 0.014 + 0.024 * Math.log10(Math.max(1, length));

const place = (pos: number, layer: number, data: Data, depth: Place["depth"] = 1): Place => ({ depth, pos, layer, head: data.chosen.head });

/** A column's name: its token. */
export function nameOf(data: Data, far: Far, column: number): string {
  const pos = tokenOf(far, column);
  const text = `“${data.tokens[pos]?.text ?? ""}”`;
  return far.block === 1 ? text : `token ${pos}, ${text}`;
}

function* streams(data: Data, far: Far): Generator<Placed> {
  const { columns, layers, block } = far;
  for (let c = 0; c < columns; c++) {
    const x = middleOf(far, c);
    const edge = (level: number): number => block * halfWidth(far.lengths[level * columns + c] as number);
    for (let l = 0; l < layers; l++) {
      const [a, b] = [edge(l), edge(l + 1)];
      const points: Point[] = [[x - a, l], [x + a, l], [x + b, l + 1], [x - b, l + 1]];
      const says = { name: `stream of ${nameOf(data, far, c)} after layer ${l}`, value: far.lengths[(l + 1) * columns + c] as number, unit: "length" };
      const at = { column: c, first: c, y: l + 1 };
      yield { ...at, mark: { kind: "area", id: `c${c}.l${l}.stream`, points, ink: "stream", says, enter: place(tokenOf(far, c), l, data) } };
      const sure = data.said?.probabilities[l * columns + c];
      if (sure !== undefined && sure > 0.02) yield { ...at, mark: { kind: "area", id: `c${c}.l${l}.sure`, points, ink: "says", alpha: sure } };
    }
  }
}

function* attention(data: Data, far: Far, { sx }: Detail): Generator<Placed> {
  const most = Math.min(9, 2.5 + 0.08 * sx * far.block);
  const chosen = columnOf(far, data.chosen.pos);
  for (let l = 0; l < far.layers; l++) {
    for (let q = 1; q < far.columns; q++) {
      for (let k = columnsBefore(far) === 0 ? 1 : 0; k < q; k++) {
        const share = far.attention[pairOf(far, l, q, k + columnsBefore(far))] as number;
        if (share < LEAST_SHARE) continue;
        const [from, to] = [middleOf(far, k), middleOf(far, q)];
        const [y0, y1] = [l + 0.08, l + SUM_OF_ATTENTION];
        const bend = Math.min(0.45 * (to - from), 0.6 * far.block);
        const isChosen = q === chosen; // what the chosen token takes stands out
        yield {
          column: q, first: k, y: y1,
          mark: {
            kind: "curve", id: `l${l}.q${q}.k${k}`, ink: "attention", width: 0.5 + most * share, alpha: Math.min(0.95, (isChosen ? 0.3 : 0.1) + (isChosen ? 1.6 : 0.9) * share),
            points: [[from, y0], [from + bend, y0 + 0.05], [to - bend, y1 - 0.1], [to, y1]],
            says: { name: `layer ${l}: ${nameOf(data, far, q)} takes from ${nameOf(data, far, k)}${far.block > 1 ? ` and the ${far.block - 1} before it` : ""}, mean of the heads`, value: share, unit: "share" },
            enter: place(tokenOf(far, q), l, data),
          },
        };
      }
    }
  }
}

/** What the later columns leave at the first one: mean over them of the share. */
export function sinkOf(far: Far, layer: number): number {
  let sum = 0;
  for (let q = 1; q < far.columns; q++) sum += far.attention[pairOf(far, layer, q, 0)] as number;
  return far.columns > 1 ? sum / (far.columns - 1) : 0;
}

function* sinks(data: Data, far: Far, { sy }: Detail): Generator<Placed> {
  if (far.start !== 0 || far.block !== 1 || far.columns < 2) return;
  for (let l = 0; l < far.layers; l++) {
    const share = sinkOf(far, l);
    const radius = share * Math.min(6, 0.42 * sy);
    if (radius < 0.5) continue;
    const says = { name: `layer ${l}: later tokens leave at the first, mean of all and of the heads`, value: share, unit: "share" };
    yield { column: 0, first: 0, y: l + 0.3, mark: { kind: "dot", id: `l${l}.sink`, at: [-0.3, l + 0.3], radius, ink: "attention", outlined: true, alpha: 0.6, says, enter: place(0, l, data) } };
  }
}

function* mlps(data: Data, far: Far, { sx, sy }: Detail): Generator<Placed> {
  const most = Math.min(5, 0.13 * sx * far.block, 0.36 * sy);
  if (most < 0.8) return;
  for (let l = 0; l < far.layers; l++) {
    for (let c = 0; c < far.columns; c++) {
      const share = far.mlpAdded[l * far.columns + c] as number;
      const x = middleOf(far, c);
      const says = { name: `layer ${l}: what the MLP adds to ${nameOf(data, far, c)}, relative to the stream`, value: share };
      yield { column: c, first: c, y: l + SUM_OF_MLP, mark: { kind: "dot", id: `c${c}.l${l}.mlp`, at: [x, l + 0.79], radius: most * Math.sqrt(Math.min(1, share)), ink: "mlp", alpha: 0.85, says, enter: place(tokenOf(far, c), l, data) } };
    }
  }
}

/** Keys and values that stay beside the column: the cache. */
function* cells(data: Data, far: Far, { sx }: Detail): Generator<Placed> {
  if (sx * far.block < 26) return;
  const size = Math.min(0.045 * far.block, 5 / sx);
  for (let l = 0; l < far.layers; l++) {
    for (let c = 0; c < far.columns; c++) {
      const x = middleOf(far, c) - 0.16 * far.block;
      const at = { column: c, first: c, y: l + 0.3 };
      for (const [i, what] of (["key", "value"] as const).entries()) {
        const x0 = x + (i - 1) * size * 1.25;
        const says = { name: `layer ${l}: ${what} of ${nameOf(data, far, c)} in the cache, mean of the groups`, value: (i ? far.values : far.keys)[l * far.columns + c] as number, unit: "length" };
        yield { ...at, mark: { kind: "box", id: `c${c}.l${l}.${what}`, rect: { x0, x1: x0 + size, y0: l + 0.14, y1: l + 0.5 }, ink: what, alpha: 0.6, says, enter: place(tokenOf(far, c), l, data) } };
      }
    }
  }
}

/** What the lens reads, where it changes: written from the top down, where there is room. */
function* words(data: Data, far: Far, { sx, sy, turned }: Detail): Generator<Placed> {
  const { said } = data;
  if (!said) return;
  const room = turned ? (sx * far.block < 40 ? 0 : 90) : sx * far.block * 0.8 - 8;
  for (let c = 0; c < far.columns; c++) {
    const isChosen = c === columnOf(far, data.chosen.pos);
    if (room < 34 && !isChosen) continue;
    let below = Infinity;
    for (let l = far.layers - 1; l >= 0; l--) {
      const [at, under] = [l * far.columns + c, (l - 1) * far.columns + c];
      const [text, p] = [said.words[at], said.probabilities[at] as number];
      if (text === undefined || (l > 0 && said.words[under] === text) || p < 0.1 || (below - l) * sy < 13) continue;
      below = l - (turned ? (widthOf(shown(text), "small") - 4) / sy : 0);
      const says = { name: `after layer ${l} the lens reads, behind ${nameOf(data, far, c)}: “${text}”`, value: p, unit: "probability" };
      yield {
        column: c, first: c, y: l + 1,
        mark: {
          kind: "text", id: `c${c}.l${l}.word`, at: [middleOf(far, c) + far.block * (turned ? 0.26 : 0.12), l + 0.9], text: shown(text), size: "small", align: turned ? "right" : "left", ink: "ink",
          alpha: 0.4 + 0.6 * p, shift: [4, 0], most: isChosen ? Math.max(90, room) : room, says, enter: place(tokenOf(far, c), l, data),
        },
      };
    }
  }
}

export const shown = (text: string): string => text.replace(/^ /, "").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "␣";

/** The text: each token is the foot of its column. */
function* tokens(data: Data, far: Far, detail: Detail): Generator<Placed> {
  const wide = detail.sx * far.block;
  if (far.block === 1 && wide >= BOXED) yield* boxes(data, far, detail);
  else if (wide >= 8) yield* staggered(data, far, detail);
}

const written = (data: Data, pos: number): string => (data.tokens[pos]?.text ?? "").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";

function* boxes(data: Data, far: Far, { sx, sy, turned }: Detail): Generator<Placed> {
  const foot = footOf(far.layers);
  const [below, above, half] = turned ? [2.5 * foot, 0.3 * foot, 0.22] : [0.92 * foot, 0.34 * foot, 0.45];
  const room = turned ? (below - above) * sy - 8 : 0.9 * sx - 6;
  for (const pass of ["box", "name"] as const) {
    for (let c = 0; c < far.columns; c++) {
      const x = far.start + c;
      const at = { column: c, first: c, y: -1 };
      const isChosen = data.chosen.pos === x;
      const rect = { x0: x - half, x1: x + half, y0: -below, y1: -above };
      const says = { name: `token ${x}, “${data.tokens[x]?.text ?? ""}”`, value: data.tokens[x]?.id ?? 0, unit: "id" };
      const enter: Place = { depth: 2, block: "text", pos: x, layer: 0, head: data.chosen.head };
      if (pass === "box") yield { ...at, mark: { kind: "box", id: `c${c}.token`, rect, ink: isChosen ? "chosen" : "line", outlined: !isChosen, corner: 5, says, enter } };
      else yield { ...at, mark: { kind: "text", id: `c${c}.name`, at: [x, (rect.y0 + rect.y1) / 2], text: written(data, x).replace(/^ /, "␣"), size: "normal", mono: true, align: "center", ink: isChosen ? "panel" : "ink", most: room } };
    }
  }
}

/** Where columns are narrow, names stand in some lines, one below the other. */
function* staggered(data: Data, far: Far, { sx, sy, turned }: Detail): Generator<Placed> {
  const foot = footOf(far.layers);
  const wide = sx * far.block;
  const lines = turned ? 1 : Math.min(3, Math.ceil(BOXED / wide));
  const every = turned ? Math.ceil(14 / wide) : Math.ceil(40 / (wide * lines)); // columns of which one has a name
  for (let c = 0; c < far.columns; c++) {
    const [x, pos] = [middleOf(far, c), tokenOf(far, c)];
    const isChosen = c === columnOf(far, data.chosen.pos);
    if (c % every && !isChosen) continue;
    const line = Math.floor(c / every) % lines;
    const at: Point = turned ? [x, -0.3 * foot] : [x, -foot * (0.24 + 0.29 * line)];
    const says = far.block === 1 ? { name: `token ${pos}, “${data.tokens[pos]?.text ?? ""}”`, value: data.tokens[pos]?.id ?? 0, unit: "id" } : { name: `${nameOf(data, far, c)}, of every ${far.block}`, value: data.tokens[pos]?.id ?? 0, unit: "id" };
    const text = far.block === 1 ? written(data, pos).trim() || "␣" : String(pos);
    const enter: Place = { depth: 2, block: "text", pos, layer: 0, head: data.chosen.head };
    yield { column: c, first: c, y: -1, mark: { kind: "text", id: `c${c}.token`, at, text, size: "small", align: turned ? "right" : "center", ink: isChosen ? "chosen" : "ink", most: turned ? 2.2 * foot * sy : wide * lines * every - 5, says, enter } };
  }
}

function* rules(data: Data, { turned }: Detail): Generator<Placed> {
  const { layers, tokens: count } = data.extent;
  const { layer } = data.chosen;
  const end = count - 0.4;
  yield { column: -1, first: -1, y: -1, mark: { kind: "box", id: "chosen.layer", rect: { x0: -0.5, x1: end, y0: layer, y1: layer + 1 }, ink: "line", alpha: 0.6 } };
  for (let l = 0; l <= layers; l += EVERY) {
    const at = { column: -1, first: -1, y: -1 };
    yield { ...at, mark: { kind: "line", id: `rule${l}`, points: [[-0.5, l], [end, l]], ink: "line", width: 1 } };
  }
  for (let l = 0; l <= layers; l += EVERY) {
    const at = { column: -1, first: -1, y: -1 };
    yield { ...at, mark: { kind: "text", id: `rule${l}.name`, at: [-0.5, l], text: String(l), size: "small", align: turned ? "center" : "right", ink: "soft", shift: turned ? [0, -8] : [-6, 0] } };
  }
}

/** Bars of what may come next: above the last column; where the picture is turned, in the column that is free. */
function* bars(data: Data, { sx, sy, turned }: Detail): Generator<Placed> {
  const { candidates } = data.next ?? { candidates: [] };
  const { tokens: count, layers } = data.extent;
  const rows = candidates.slice(0, 6);
  const largest = rows[0]?.probability ?? 1;
  const top = topOf(layers);
  const along = turned ? sy : sx; // pixels of a unit in the bars' direction
  const [from, step] = turned ? [count - 0.55, 1.3 / 6] : [layers + 0.95 * top, (0.88 * top) / 6];
  const left = turned ? 0 : Math.min(count - 0.75, count + 0.85 - 230 / sx); // some pixels are free at the edge
  const at = { column: count - 1, first: 0, y: layers + 0.5 };
  const spot = (x: number, down: number): Point => (turned ? [from + down, x] : [x, from - down]);
  for (const [i, one] of rows.entries()) {
    const right = left + Math.max(2, (100 * one.probability) / largest) / along;
    const [a, b] = [spot(left, i * step), spot(right, (i + 0.76) * step)];
    const says = { name: `next: “${one.text}”`, value: one.probability, unit: "probability" };
    const enter: Place = { depth: 2, block: "logits", pos: count - 1, layer: layers - 1, head: data.chosen.head };
    const rect = { x0: Math.min(a[0], b[0]), x1: Math.max(a[0], b[0]), y0: Math.min(a[1], b[1]), y1: Math.max(a[1], b[1]) };
    yield { ...at, mark: { kind: "box", id: `next${i}`, rect, ink: "says", alpha: i ? 0.7 : 1, says, enter } };
  }
  for (const [i, one] of rows.entries()) {
    const right = left + Math.max(2, (100 * one.probability) / largest) / along;
    const text = `${shown(one.text)}  ${(100 * one.probability).toFixed(1)} %`;
    yield { ...at, mark: { kind: "text", id: `next${i}.name`, at: spot(right, (i + 0.38) * step), text, size: "small", align: "left", ink: i ? "soft" : "ink", shift: [6, 0] } };
  }
}

function build(data: Data, detail: Detail): Placed[] {
  const { far } = data;
  if (!far) return [...rules(data, detail)];
  return [
    ...rules(data, detail), ...attention(data, far, detail), ...streams(data, far), ...cells(data, far, detail), ...mlps(data, far, detail),
    ...sinks(data, far, detail), ...words(data, far, detail), ...tokens(data, far, detail), ...bars(data, detail),
  ];
}

/** In steps of a tenth: a zoom makes marks anew some ten times, and not at each frame. */
const stepOf = (scale: number): number => 1.1 ** Math.round(Math.log(scale) / Math.log(1.1));

interface Built {
  readonly key: string;
  readonly said: Data["said"];
  readonly next: Data["next"];
  readonly all: readonly Placed[];
  readonly marks: readonly Mark[];
}

const made = new WeakMap<object, Built[]>();
const MOST_BUILT = 4;

function builtOf(data: Data, camera: Camera): Built {
  const scale = scaleOf(camera);
  const detail = { sx: stepOf(scale.x), sy: stepOf(scale.y), turned: camera.turned };
  const { pos, head } = data.chosen;
  const key = `${detail.sx} ${detail.sy} ${detail.turned} ${pos} ${head}`;
  const of = data.far ?? data;
  const kept = made.get(of) ?? [];
  const known = kept.find((one) => one.key === key && one.said === data.said && one.next === data.next);
  if (known) return known;
  const all = build(data, detail);
  const built = { key, said: data.said, next: data.next, all, marks: all.map((one) => one.mark) };
  made.set(of, [built, ...kept].slice(0, MOST_BUILT));
  return built;
}

function marks(data: Data, camera: Camera, moment: Moment): readonly Mark[] {
  const built = builtOf(data, camera);
  const { rect } = camera;
  const { far } = data;
  if (!far) return built.marks;
  const isWhole = rect.x0 <= -0.5 && rect.x1 >= data.extent.tokens - 0.5 && rect.y0 <= 0 && rect.y1 >= far.layers;
  if (isWhole && moment === REST) return built.marks;
  const [first, last] = [Math.floor((rect.x0 - far.start) / far.block) - 1, Math.ceil((rect.x1 - far.start) / far.block) + 1];
  const from = columnOf(far, moment.from);
  return built.all
    .filter((one) => one.column < 0 || (one.first <= last && one.column >= first && (one.y < 0 || (one.y >= rect.y0 - 1 && one.y <= rect.y1 + 1.5 + topOf(far.layers)))))
    .filter((one) => one.column < from || one.y <= moment.height)
    .map((one) => one.mark);
}

export const whole: DepthScene = {
  name: "whole",
  strength: (data, camera) => (1 - fade(scaleOf(camera).y, ...NEAR)) * (1 - blockStrength(data, camera)),
  marks,
};
