/** Depth 0: the whole pass. Streams rise through the layers, curves are what attention brings, dots what the MLPs add, words what the lens reads. */

import { scaleOf, type Camera } from "../places/camera";
import { beginOf, columnOf, columnsBefore, middleOf, pairOf, REST, tokenOf, type Data, type Far, type Moment } from "../data/data";
import { bandOf, folded, rowOf, tallOf } from "../data/fold";
import { visible } from "../../lib/format";
import type { DepthScene } from "./depth";
import { blockStrength, layerNearness } from "./entered";
import { footOf, SUM_OF_ATTENTION, SUM_OF_MLP, topOf } from "../places/layout";
import { widthOf } from "../marks/look";
import type { Mark, Point } from "../marks/marks";
import type { Place } from "../places/place";

/** A thread of attention that is thinner is not drawn; the table of a layer has all of them. */
const LEAST_SHARE = 0.06;
/** In blocks shares are thin: the largest of each block are drawn, on a scale of logarithms that begins here. */
const LEAST_OF_BLOCK = 0.01;
const LARGEST_OF_BLOCK = 3;
const EVERY = 5; // layers with a rule and a number
const SINK = -0.26; // where the bars of the sink begin, beside the first column
const CACHE = -0.135; // where the cells of the cache end, for a column's width
const [MOST_BARS, LEAST_BAR] = [6, 10.9] as const; // of the next token; pixels of one
const BOXED = 52; // pixels of a column in which a token has a box

/** A mark with its column, -1 of none, and the height that a pass has to reach before it is there. */
interface Placed {
  readonly mark: Mark;
  readonly column: number;
  readonly y: number;
}

/** What of the camera marks depend on, in steps: within a step the same marks are painted elsewhere. */
interface Detail {
  readonly sx: number;
  readonly sy: number;
  readonly turned: boolean;
  /** Pixels of the whole picture upwards. */
  readonly high: number;
}

export const halfWidth = (length: number): number => 0.014 + 0.024 * Math.log10(Math.max(1, length));

const place = (pos: number, layer: number, data: Data, depth: Place["depth"] = 1): Place => ({ depth, pos, layer, head: data.chosen.head });

/** A column's name: its token. */
export function nameOf(data: Data, far: Far, column: number): string {
  const pos = tokenOf(far, column);
  const text = `“${data.tokens[pos]?.text ?? ""}”`;
  if (far.isMean) return `tokens ${beginOf(far, column)} to ${pos}`;
  return far.block === 1 ? text : `token ${pos}, ${text}`;
}

/** What is said of a number that is of several tokens. */
const meanOf = (far: Far): string => (far.isMean ? ", mean" : "");

/** A row's name: its layer, or its layers where they are folded, whose mean its numbers are. */
function layerOf(far: Far, row: number): string {
  const [first, last] = bandOf(far, row);
  return last > first ? `layers ${first} to ${last}` : `layer ${first}`;
}

const meanOfBand = (far: Far): string => (far.bands ? ", mean of the layers" : "");

/** The height of a share of a row. */
const heightAt = (far: Far, row: number, share: number): number => bandOf(far, row)[0] + share * tallOf(far, row);

/** Of one row of attention, the least share that is drawn. */
function leastOf(far: Far, shares: readonly number[]): number {
  return far.isMean ? Math.max(LEAST_OF_BLOCK, shares.toSorted((a, b) => b - a)[LARGEST_OF_BLOCK - 1] ?? 0) : LEAST_SHARE;
}

const strengthOf = (far: Far, share: number): number => (far.isMean ? (1 - Math.log(share) / Math.log(LEAST_OF_BLOCK)) ** 2 : share);

function* streams(data: Data, far: Far, l: number): Generator<Placed> {
  const { columns, block } = far;
  const [first, last] = bandOf(far, l);
  const top = last + 1;
  const edge = (level: number, c: number): number => block * halfWidth(far.lengths[level * columns + c] as number);
  const outline = (c: number): Point[] => {
    const [x, a, b] = [middleOf(far, c), edge(l, c), edge(l + 1, c)];
    return [[x - a, first], [x + a, first], [x + b, top], [x - b, top]];
  };
  for (let c = 0; c < columns; c++) {
    const says = { name: `stream of ${nameOf(data, far, c)} after layer ${last}${meanOf(far)}`, value: far.lengths[(l + 1) * columns + c] as number, unit: "length" };
    yield { column: c, y: top, mark: { kind: "area", id: `c${c}.l${first}.stream`, points: outline(c), ink: "stream", says, enter: place(tokenOf(far, c), first, data) } };
  }
  for (let c = 0; c < columns; c++) {
    const sure = data.said?.probabilities[l * columns + c];
    if (sure !== undefined && sure > 0.02) yield { column: c, y: top, mark: { kind: "area", id: `c${c}.l${first}.sure`, points: outline(c), ink: "says", alpha: sure } };
  }
}

function* attention(data: Data, far: Far, { sx, sy, turned }: Detail, l: number): Generator<Placed> {
  const most = Math.min(turned ? 0.4 * sy * tallOf(far, l) : 9, 2.5 + 0.08 * sx * far.block);
  const chosen = columnOf(far, data.chosen.pos);
  const before = columnsBefore(far);
  const [first, tall] = [bandOf(far, l)[0], tallOf(far, l)];
  const [y0, y1] = [heightAt(far, l, 0.08), heightAt(far, l, SUM_OF_ATTENTION)];
  const firstKey = before === 0 ? 1 : 0;
  for (let q = far.isWhole ? 0 : 1; q < far.columns; q++) {
    const shares = Array.from({ length: (far.isWhole ? far.columns : q) - firstKey }, (_, i) => (i + firstKey === q ? 0 : (far.attention[pairOf(far, l, q, i + firstKey + before)] as number)));
    const least = leastOf(far, shares);
    for (const [i, share] of shares.entries()) {
      if (share < least) continue;
      const k = i + firstKey;
      const [from, to] = [middleOf(far, k), middleOf(far, q)];
      const bend = Math.sign(to - from) * Math.min(0.45 * Math.abs(to - from), 0.6 * far.block);
      const isChosen = q === chosen; // what the chosen token takes stands out
      const others = far.block > 1 && !far.isMean ? ` and the ${far.block - 1} before it` : "";
      const strength = strengthOf(far, share);
      yield {
        column: q, y: y1,
        mark: {
          kind: "curve", id: `l${first}.q${q}.k${k}`, ink: "attention", width: 0.5 + most * strength, alpha: Math.min(0.95, (isChosen ? 0.3 : 0.1) + (isChosen ? 1.6 : 0.9) * strength),
          points: [[from, y0], [from + bend, y0 + 0.05 * tall], [to - bend, y1 - 0.1 * tall], [to, y1]],
          says: { name: `${layerOf(far, l)}: ${far.isMean ? "the most that one of " : ""}${nameOf(data, far, q)} takes from ${nameOf(data, far, k)}${others}, mean of the heads${far.bands ? " and layers" : ""}`, value: share, unit: "share" },
          enter: place(tokenOf(far, q), first, data),
        },
      };
    }
  }
}

/** What the later columns leave at the first one: mean over them of the share. */
export function sinkOf(far: Far, layer: number): number {
  let sum = 0;
  for (let q = 1; q < far.columns; q++) sum += far.attention[pairOf(far, layer, q, 0)] as number;
  return far.columns > 1 ? sum / (far.columns - 1) : 0;
}

const hasSink = (far: Far): boolean => far.start === 0 && far.block === 1 && far.columns > 1;

/** Left of the first column in each layer: a bar as long as what later tokens leave there. */
function* sinks(data: Data, far: Far, l: number): Generator<Placed> {
  if (!hasSink(far)) return;
  const share = sinkOf(far, l);
  if (share < 0.02) return;
  const [first] = bandOf(far, l);
  const says = { name: `${layerOf(far, l)}: later tokens leave at the first, mean of all and of the heads${far.bands ? " and layers" : ""}`, value: share, unit: "share" };
  const rect = { x0: SINK - 0.2 * share, x1: SINK, y0: heightAt(far, l, 0.36), y1: heightAt(far, l, 0.64) };
  yield { column: 0, y: heightAt(far, l, 0.3), mark: { kind: "box", id: `l${first}.sink`, rect, ink: "attention", alpha: 0.5, says, enter: place(0, first, data) } };
}

function* mlps(data: Data, far: Far, { sx, sy }: Detail, l: number): Generator<Placed> {
  const most = Math.min(5, 0.13 * sx * far.block, 0.36 * sy * tallOf(far, l));
  const [first] = bandOf(far, l);
  if (most < 0.8) return;
  for (let c = 0; c < far.columns; c++) {
    const share = far.mlpAdded[l * far.columns + c] as number;
    const says = { name: `${layerOf(far, l)}: what the MLP adds to ${nameOf(data, far, c)}, relative to the stream${meanOf(far)}${meanOfBand(far)}`, value: share };
    yield { column: c, y: heightAt(far, l, SUM_OF_MLP), mark: { kind: "dot", id: `c${c}.l${first}.mlp`, at: [middleOf(far, c), heightAt(far, l, 0.79)], radius: most * Math.sqrt(Math.min(1, share)), ink: "mlp", says, enter: place(tokenOf(far, c), first, data) } };
  }
}

/** Keys and values that stay beside the column: the cache, a narrow ladder with a rung for each layer. */
function* cells(data: Data, far: Far, { sx }: Detail, l: number): Generator<Placed> {
  if (sx * far.block < 26) return;
  const size = Math.min(0.035 * far.block, 3.5 / sx);
  const [first, tall] = [bandOf(far, l)[0], tallOf(far, l)];
  for (let c = 0; c < far.columns; c++) {
    const x = middleOf(far, c) + CACHE * far.block;
    for (const [i, what] of (["key", "value"] as const).entries()) {
      const x0 = x + (i - 2) * size;
      const says = { name: `${layerOf(far, l)}: ${what} of ${nameOf(data, far, c)} in the cache, mean of the groups${far.isMean ? " and tokens" : ""}${far.bands ? " and layers" : ""}`, value: (i ? far.values : far.keys)[l * far.columns + c] as number, unit: "length" };
      const rect = { x0, x1: x0 + size, y0: first + 0.04, y1: first + tall - 0.04 };
      yield { column: c, y: heightAt(far, l, 0.3), mark: { kind: "box", id: `c${c}.l${first}.${what}`, rect, ink: what, alpha: 0.4, says, enter: place(tokenOf(far, c), first, data) } };
    }
  }
}

/** What the lens reads at the chosen token, where it changes: written from the top down, where there is room. */
function* words(data: Data, far: Far, { sx, sy, turned }: Detail): Generator<Placed> {
  const { said } = data;
  const c = columnOf(far, data.chosen.pos);
  if (!said || c < 0 || c >= far.columns) return;
  const room = Math.max(90, turned ? 90 : sx * far.block * 0.8 - 8);
  let below = Infinity;
  for (let l = far.layers - 1; l >= 0; l--) {
    const [at, under] = [l * far.columns + c, (l - 1) * far.columns + c];
    const [text, p] = [said.words[at], said.probabilities[at] as number];
    const top = bandOf(far, l)[1] + 1;
    if (text === undefined || (l > 0 && said.words[under] === text) || p < 0.1 || (below - top) * sy < 13) continue;
    below = top - (turned ? (widthOf(visible(text), "small") - 4) / sy : 0);
    const says = { name: `after layer ${top - 1} the lens reads, behind ${far.isMean ? `token ${tokenOf(far, c)}` : nameOf(data, far, c)}: “${text}”`, value: p, unit: "probability" };
    yield {
      column: c, y: top,
      mark: {
        kind: "text", id: `c${c}.l${bandOf(far, l)[0]}.word`, at: [middleOf(far, c) + far.block * (turned ? 0.26 : 0.12), top - 0.1], text: visible(text), size: "small", align: turned ? "right" : "left", ink: "ink",
        alpha: 0.4 + 0.6 * p, shift: [4, 0], most: room, says, enter: place(tokenOf(far, c), top - 1, data),
      },
    };
  }
}

/** The text: each token is the foot of its column. */
function* tokens(data: Data, far: Far, detail: Detail): Generator<Placed> {
  const wide = detail.sx * far.block;
  if (far.block === 1 && wide >= BOXED) yield* boxes(data, far, detail);
  else if (wide >= 8) yield* staggered(data, far, detail);
}

const written = (data: Data, pos: number): string => visible(data.tokens[pos]?.text);

function* boxes(data: Data, far: Far, { sx, sy, turned }: Detail): Generator<Placed> {
  const foot = footOf(data.extent.layers);
  const [below, above, half] = turned ? [2.5 * foot, 0.3 * foot, 0.22] : [0.92 * foot, 0.34 * foot, 0.45];
  const room = turned ? (below - above) * sy - 8 : 0.9 * sx - 6;
  for (const pass of ["box", "name"] as const) {
    for (let c = 0; c < far.columns; c++) {
      const x = far.start + c;
      const at = { column: c, y: -1 };
      const isChosen = data.chosen.pos === x;
      const rect = { x0: x - half, x1: x + half, y0: -below, y1: -above };
      const says = { name: `token ${x}, “${data.tokens[x]?.text ?? ""}”`, value: data.tokens[x]?.id ?? 0, unit: "id" };
      const enter: Place = { depth: 2, block: "text", pos: x, layer: 0, head: data.chosen.head };
      if (pass === "box") yield { ...at, mark: { kind: "box", id: `c${c}.token`, rect, ink: isChosen ? "chosen" : "line", outlined: !isChosen, corner: 5, says, enter } };
      else yield { ...at, mark: { kind: "text", id: `c${c}.name`, at: [x, (rect.y0 + rect.y1) / 2], text: written(data, x), size: "normal", mono: true, align: "center", ink: isChosen ? "panel" : "ink", most: room } };
    }
  }
}

/** Where columns are narrow, names stand in some lines, one below the other. */
function* staggered(data: Data, far: Far, { sx, sy, turned }: Detail): Generator<Placed> {
  const foot = footOf(data.extent.layers);
  const wide = sx * far.block;
  const lines = turned ? 1 : Math.min(3, Math.ceil(BOXED / wide));
  const every = turned ? Math.ceil(14 / wide) : Math.ceil(40 / (wide * lines)); // columns of which one has a name
  for (let c = 0; c < far.columns; c++) {
    const [x, pos] = [middleOf(far, c), tokenOf(far, c)];
    const isChosen = c === columnOf(far, data.chosen.pos);
    if (c % every && !isChosen) continue;
    const line = Math.floor(c / every) % lines;
    const at: Point = turned ? [x, -0.3 * foot] : [x, -foot * (0.24 + 0.29 * line)];
    const says = far.block === 1 ? { name: `token ${pos}, “${data.tokens[pos]?.text ?? ""}”`, value: data.tokens[pos]?.id ?? 0, unit: "id" } : { name: far.isMean ? `token ${pos}, the last of ${nameOf(data, far, c)}` : `${nameOf(data, far, c)}, of every ${far.block}`, value: data.tokens[pos]?.id ?? 0, unit: "id" };
    const text = far.block === 1 ? written(data, pos) : String(pos);
    const enter: Place = { depth: 2, block: "text", pos, layer: 0, head: data.chosen.head };
    yield { column: c, y: -1, mark: { kind: "text", id: `c${c}.token`, at, text, size: "small", align: turned ? "right" : "center", ink: isChosen ? "chosen" : "ink", most: turned ? 2.2 * foot * sy : wide * lines * every - 5, says, enter } };
  }
}

function* rules(data: Data, { turned }: Detail): Generator<Placed> {
  const { layers, tokens: count } = data.extent;
  const { layer } = data.chosen;
  const end = count - 0.4;
  if (data.far && hasSink(data.far) && !turned) yield { column: -1, y: -1, mark: { kind: "text", id: "sink.name", at: [SINK, layers], text: "sink", size: "small", align: "right", ink: "soft", shift: [0, -8] } };
  if (!data.far?.bands) yield { column: -1, y: -1, mark: { kind: "box", id: "chosen.layer", rect: { x0: -0.5, x1: end, y0: layer, y1: layer + 1 }, ink: "line", alpha: 0.6 } };
  const bands = data.far?.bands;
  const heights = bands ? [...bands.map(([first]) => first), layers] : Array.from({ length: Math.floor(layers / EVERY) + 1 }, (_, i) => i * EVERY);
  for (const l of heights) {
    const at = { column: -1, y: -1 };
    yield { ...at, mark: { kind: "line", id: `rule${l}`, points: [[-0.5, l], [end, l]], ink: "line", width: 1 } };
  }
  for (const l of heights) {
    const at = { column: -1, y: -1 };
    yield { ...at, mark: { kind: "text", id: `rule${l}.name`, at: [-0.5, l], text: String(l), size: "small", align: turned ? "center" : "right", ink: "soft", shift: turned ? [0, -8] : [-6, 0] } };
  }
}

/** Bars of what may come next: above the last column; where the picture is turned, in the column that is free. */
function* bars(data: Data, { sx, sy, turned, high }: Detail): Generator<Placed> {
  const { candidates } = data.next ?? { candidates: [] };
  const { tokens: count, layers } = data.extent;
  const top = topOf(layers);
  const room = turned ? MOST_BARS : Math.floor((0.88 * top * high) / (layers + top + footOf(layers)) / LEAST_BAR);
  const shown = Math.max(1, Math.min(MOST_BARS, room));
  const rows = candidates.slice(0, shown);
  const largest = rows[0]?.probability ?? 1;
  const along = turned ? sy : sx; // pixels of a unit in the bars' direction
  const [from, step] = turned ? [count - 0.55, 1.3 / shown] : [layers + 0.95 * top, (0.88 * top) / shown];
  const left = turned ? 0 : Math.min(count - 0.75, count + 0.85 - 230 / sx); // some pixels are free at the edge
  const at = { column: count - 1, y: layers + 0.5 };
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
    const text = `${visible(one.text)}  ${(100 * one.probability).toFixed(1)} %`;
    yield { ...at, mark: { kind: "text", id: `next${i}.name`, at: spot(right, (i + 0.38) * step), text, size: "small", align: "left", ink: i ? "soft" : "ink", shift: [6, 0] } };
  }
}

/** In steps of a tenth: a zoom makes marks anew some ten times, and not at each frame. */
const stepOf = (scale: number): number => 1.1 ** Math.round(Math.log(scale) / Math.log(1.1));

/** The height of a layer in larger steps: little depends on it. */
const heightOf = (scale: number): number => 1.5 ** Math.round(Math.log(scale) / Math.log(1.5));

/** The marks for one detail of the camera: a list for what is below the layers, one for each layer, made when it is seen first, and one for what is above. */
class Built {
  readonly said: Data["said"];
  readonly next: Data["next"];
  readonly #bands = new Map<number, { all: readonly Placed[]; marks: readonly Mark[] }>();
  readonly #parts = new Map<string, readonly Mark[]>();
  #words: readonly Placed[] | undefined;

  constructor(
    readonly key: string,
    private readonly data: Data,
    private readonly far: Far,
    private readonly detail: Detail,
  ) {
    this.said = data.said;
    this.next = data.next;
  }

  readonly below = (data: Data): readonly Mark[] => this.#once(`below ${data.chosen.layer}`, () => [...rules(data, this.detail)]);
  readonly text = (): readonly Mark[] => this.#once("text", () => [...tokens(this.data, this.far, this.detail)]);
  readonly above = (): readonly Mark[] => this.#once("above", () => [...bars(this.data, this.detail)]);

  /** A layer's marks: all, or those that a pass has reached whose columns from one on are on their way. */
  layer(l: number, from: number, height: number): readonly Mark[] {
    const band = this.#band(l);
    const [first, last] = bandOf(this.far, l);
    if (from >= this.far.columns || height >= last + 1) return band.marks;
    const reached = Math.max(first, Math.floor(height * 10) / 10);
    return this.#once(`${l} ${from} ${reached}`, () => band.all.filter((one) => one.column < from || one.y <= reached));
  }

  #band(l: number): { all: readonly Placed[]; marks: readonly Mark[] } {
    const known = this.#bands.get(l);
    if (known) return known;
    const { data, far, detail } = this;
    this.#words ??= [...words(data, far, detail)];
    const all = [
      ...attention(data, far, detail, l), ...streams(data, far, l), ...cells(data, far, detail, l), ...mlps(data, far, detail, l),
      ...sinks(data, far, l), ...this.#words.filter((one) => one.y === bandOf(far, l)[1] + 1),
    ];
    const band = { all, marks: all.map(({ mark }) => mark) };
    this.#bands.set(l, band);
    return band;
  }

  #once(key: string, make: () => readonly Placed[]): readonly Mark[] {
    const known = this.#parts.get(key);
    if (known) return known;
    const marks = make().map(({ mark }) => mark);
    this.#parts.set(key, marks);
    return marks;
  }
}

const made = new WeakMap<Far, Built[]>();
const MOST_BUILT = 6;

function builtOf(data: Data, far: Far, detail: Detail): Built {
  const { pos, head } = data.chosen;
  const key = [detail.sx, detail.sy, detail.turned, detail.high, pos, head].join();
  const kept = made.get(far) ?? [];
  const known = kept.find((one) => one.key === key && one.said === data.said && one.next === data.next);
  if (known) return known;
  const built = new Built(key, data, far, detail);
  made.set(far, [built, ...kept].slice(0, MOST_BUILT));
  return built;
}

/** Lists of marks in the order in which they are painted; a layer that is not seen has none. */
function parts(all: Data, camera: Camera, moment: Moment): readonly (readonly Mark[])[] {
  const data = folded(all);
  const scale = scaleOf(camera);
  const detail = { sx: stepOf(scale.x), sy: heightOf(scale.y), turned: camera.turned, high: camera.size.height };
  const { far } = data;
  if (!far) return [[...rules(data, detail)].map(({ mark }) => mark)];
  const { layers } = data.extent;
  const { y0, y1 } = camera.rect;
  const built = builtOf(data, far, detail);
  const from = moment === REST ? Infinity : columnOf(far, moment.from);
  const seen = (y: number): number => rowOf(far, Math.min(layers - 1, Math.max(0, Math.floor(y))));
  const first = seen(y0 - 1);
  const bands = y0 - 1 < layers && y1 > -1 ? Array.from({ length: seen(y1 + 1) + 1 - first }, (_, i) => built.layer(first + i, from, moment.height)) : [];
  const isThrough = from >= far.columns || moment.height >= layers + 0.5;
  return [built.below(data), ...bands, ...(y0 < 0 ? [built.text()] : []), ...(y1 > layers && isThrough ? [built.above()] : [])];
}

export const whole: DepthScene = {
  name: "whole",
  strength: (data, camera) => (1 - layerNearness(data, camera)) * (1 - blockStrength(data, camera)),
  marks: (data, camera, moment) => parts(data, camera, moment).flat(),
  parts,
};
