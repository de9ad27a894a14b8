/** Passes over texts, by their ids, and what they computed: kept within a bound of bytes, the least recently used goes first. */
import type { Edit, Model, ModelConfig } from "../engine/types";
import AXES from "./activations.json";
import { Refused } from "./asked";
import { range, row, softmax, take, type Tensor } from "./tensor";

export type Name = keyof typeof AXES;

/** The axes of every activation; those of the layers begin with L. */
export const axesOf = (name: Name): string => AXES[name];

const FROM_CACHE: readonly Name[] = ["k_rot", "scores", "pattern"];
const TAPPED = (Object.keys(AXES) as Name[]).filter((name) => !FROM_CACHE.includes(name) && name !== "logits");
const MOST_PASSES = 64;
const MOST_BYTES = 256e6;
const AHEAD_BYTES = 64e6; // what is computed besides what was asked for: after one layer the next is often asked for

export interface Pass {
  readonly id: string;
  readonly ids: readonly number[];
}

const namedTap = (name: Name, layer: number | undefined): string => (layer === undefined ? name : `${name}.${layer}`);

export class Passes {
  readonly #passes = new Map<string, Pass>();
  readonly #numbered = new Map<string, string>();
  /** By pass, activation and layer: numbers of all its tokens. */
  readonly #kept = new Map<string, Float32Array>();
  #bytes = 0;
  /** Whose keys and values the model's cache holds. */
  #cached: readonly number[] = [];

  /** `instance` is the model's number among those that a page has opened: a pass of one is never taken for one of another. */
  constructor(readonly model: Model, private readonly instance = 1) {}

  get config(): ModelConfig {
    return this.model.config;
  }

  add(ids: readonly number[]): Pass {
    const { vocab, context } = this.config;
    if (!ids.length) throw new Refused(400, "the text has no tokens; expected at least one", "invalid_parameter", "text");
    if (ids.length > context) {
      throw new Refused(400, `${ids.length} tokens; the model's context holds ${context}: use a shorter text`, "context_length_exceeded", "text");
    }
    if (ids.some((id) => !Number.isInteger(id) || id < 0 || id >= vocab)) {
      throw new Refused(400, `an id is outside of the vocabulary, 0 to ${vocab - 1}`, "invalid_parameter", "ids");
    }
    const id = this.#idOf(ids);
    const pass = { id, ids };
    this.#passes.delete(id);
    this.#passes.set(id, pass);
    for (const [oldest] of this.#passes) {
      if (this.#passes.size <= MOST_PASSES) break;
      this.#passes.delete(oldest);
    }
    return pass;
  }

  /** The same ids are the same pass. */
  #idOf(ids: readonly number[]): string {
    const key = ids.join();
    const id = this.#numbered.get(key) ?? `pass-${this.instance}-${this.#numbered.size}`;
    this.#numbered.set(key, id);
    return id;
  }

  find(id: string): Pass {
    const pass = this.#passes.get(id);
    if (!pass) throw new Refused(404, "this pass is not known any more; request it again with its ids", "unknown_pass", "id");
    return pass;
  }

  /** Logits after the positions from `start` up to `stop`, which is left out: (stop - start, V). */
  logits({ ids }: Pick<Pass, "ids">, start: number, stop: number): Float32Array {
    const shared = this.#shared(ids);
    const begin = Math.min(shared, start);
    if (begin < start) this.#run(ids, begin, start, "none");
    return this.#run(ids, start, stop, "all");
  }

  /** Run tokens up to `stop`, which is left out, as far as the cache does not hold them. */
  fill(ids: readonly number[], stop: number): void {
    const shared = this.#shared(ids);
    if (shared < stop) this.#run(ids, shared, stop, "none");
  }

  /**
   * Logits after the last of these tokens, of a pass with edits; from `start` on they are run, and what is before has been. Keys and values
   * from there on are those of the edits, and of no later pass.
   */
  edited(ids: readonly number[], start: number, edits: readonly Edit[]): Float32Array {
    this.#cached = this.#cached.slice(0, start);
    return this.model.run({ ids: ids.slice(start), start, edits, logitRows: "last" }).logits;
  }

  /** How many of these tokens the cache holds. */
  #shared(ids: readonly number[]): number {
    const limit = Math.min(ids.length, this.#cached.length);
    let shared = 0;
    while (shared < limit && ids[shared] === this.#cached[shared]) shared++;
    return shared;
  }

  #run(ids: readonly number[], start: number, stop: number, logitRows: "all" | "none"): Float32Array {
    this.#cached = ids.slice(0, start); // of a run that fails nothing more is known
    const { logits } = this.model.run({ ids: ids.slice(start, stop), start, logitRows });
    this.#cached = ids.slice(0, stop);
    return logits;
  }

  /** What a pass computed under this name at all its tokens; of a layer, or of none. */
  tapped(pass: Pass, name: Name, layer?: number): Float32Array {
    const known = this.#look(pass, name, layer);
    if (known) return known;
    this.#compute(pass, name, layer);
    return this.#look(pass, name, layer) as Float32Array;
  }

  #look(pass: Pass, name: Name, layer?: number): Float32Array | undefined {
    const key = `${pass.id} ${namedTap(name, layer)}`;
    const values = this.#kept.get(key);
    if (values) {
      this.#kept.delete(key);
      this.#kept.set(key, values); // the last used
    }
    return values;
  }

  /** Run the text, and keep what was asked for: everything where that is little, else the name in all layers, or in its own. */
  #compute(pass: Pass, name: Name, layer: number | undefined): void {
    const layers = range(0, this.config.layers);
    const ofAll = (names: readonly Name[]): string[] =>
      names.flatMap((one) => (axesOf(one).startsWith("L") ? layers.map((i) => namedTap(one, i)) : [one]));
    const every: readonly Name[] = [...TAPPED, "k_rot"];
    const fits = (names: readonly Name[]): boolean => pass.ids.length * 4 * this.#width(names) <= AHEAD_BYTES;
    const taps = fits(every) ? ofAll(every) : fits([name]) ? ofAll([name]) : [namedTap(name, layer)];
    this.#cached = [];
    const passed = this.model.run({ ids: pass.ids, start: 0, taps, logitRows: "none" });
    this.#cached = pass.ids;
    for (const tap of taps) this.#keep(`${pass.id} ${tap}`, passed.taps[tap] as Float32Array, taps.length);
  }

  /** Numbers of a token under these names, in all layers. */
  #width(names: readonly Name[]): number {
    const { layers } = this.config;
    const sizes = this.sizes(0);
    const of = (name: Name): number => [...axesOf(name)].reduce((product, axis) => product * ("LTS".includes(axis) ? 1 : (sizes[axis] as number)), 1);
    return names.reduce((sum, name) => sum + of(name) * (axesOf(name).startsWith("L") ? layers : 1), 0);
  }

  #keep(key: string, values: Float32Array, newest: number): void {
    this.#kept.set(key, values);
    this.#bytes += values.byteLength;
    for (const [oldest, old] of this.#kept) {
      if (this.#bytes <= MOST_BYTES || this.#kept.size <= newest) return;
      this.#kept.delete(oldest);
      this.#bytes -= old.byteLength;
    }
  }

  /** The length of each axis, for a text of so many tokens. */
  sizes(tokens: number): Record<string, number> {
    const { hidden: D, heads: N, kvHeads: K, headDim: H, intermediate: F, vocab: V, layers: L } = this.config;
    return { D, N, K, H, F, V, L, T: tokens, S: tokens };
  }

  /** An activation of a layer, or of none, at some positions of its axis T. */
  at(pass: Pass, name: Name, layer: number | undefined, positions: readonly number[]): Tensor {
    if (name === "scores" || name === "pattern") return this.#looks(pass, name, layer as number, positions);
    const axes = axesOf(name).replace("L", "");
    const sizes = this.sizes(pass.ids.length);
    const tensor = (values: Float32Array): Tensor => ({ values, axes, shape: [...axes].map((axis) => sizes[axis] as number) });
    if (name === "logits") {
      const [first, last] = [Math.min(...positions), Math.max(...positions)];
      const values = this.logits(pass, first, last + 1);
      return take({ values, axes, shape: [last + 1 - first, this.config.vocab] }, "T", positions.map((one) => one - first));
    }
    const whole = tensor(this.tapped(pass, name, layer));
    const isWhole = positions.length === pass.ids.length && positions.every((one, i) => one === i);
    return isWhole || !axes.includes("T") ? whole : take(whole, "T", positions);
  }

  /** Scores, or their softmax: what each head of a layer makes of the queries at some positions and of all keys, (N, T, S). */
  #looks(pass: Pass, name: "scores" | "pattern", layer: number, positions: readonly number[]): Tensor {
    const { heads, kvHeads, headDim, window } = this.config;
    const [q, k] = [this.tapped(pass, "q_rot", layer), this.tapped(pass, "k_rot", layer)];
    const [tokens, group, scale] = [pass.ids.length, heads / kvHeads, Math.fround(headDim ** -0.5)];
    const values = new Float32Array(heads * positions.length * tokens);
    for (let head = 0; head < heads; head++) {
      positions.forEach((query, i) => {
        const scores = row(values, head * positions.length + i, tokens).fill(-Infinity);
        const asked = row(q, query * heads + head, headDim);
        for (let key = window === null ? 0 : Math.max(0, query - window + 1); key <= query; key++) {
          const held = row(k, key * kvHeads + Math.floor(head / group), headDim);
          let sum = 0;
          for (let h = 0; h < headDim; h++) sum += (asked[h] as number) * (held[h] as number);
          scores[key] = Math.fround(sum) * scale;
        }
        if (name === "pattern") scores.set(softmax(scores));
      });
    }
    return { values, axes: "NTS", shape: [heads, positions.length, tokens] };
  }
}
