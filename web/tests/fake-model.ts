/** A small Llama in plain TypeScript with the engine's interface: its numbers are random, and its relations are those of a pass. */
import type { Edit, Encoded, Model, ModelConfig, Part, Passed, Run, Sampling } from "../src/engine/types";

const [D, N, K, H, F, V, L, CONTEXT] = [16, 4, 2, 4, 24, 12, 3, 64] as const;
const CHARACTERS = [..."abcdefghij \n"];

function random(seed: number): () => number {
  let state = seed;
  return () => {
    state = (state * 1664525 + 1013904223) % 2 ** 32;
    return state / 2 ** 31 - 1;
  };
}

const shapes = (layer: number): Record<string, [number, number]> => ({
  [`model.layers.${layer}.self_attn.q_proj.weight`]: [N * H, D], [`model.layers.${layer}.self_attn.k_proj.weight`]: [K * H, D],
  [`model.layers.${layer}.self_attn.v_proj.weight`]: [K * H, D], [`model.layers.${layer}.self_attn.o_proj.weight`]: [D, N * H],
  [`model.layers.${layer}.mlp.gate_proj.weight`]: [F, D], [`model.layers.${layer}.mlp.up_proj.weight`]: [F, D],
  [`model.layers.${layer}.mlp.down_proj.weight`]: [D, F],
});

function times(weight: Float32Array, x: Float32Array, width: number): Float32Array {
  return Float32Array.from({ length: weight.length / width }, (_, i) => {
    let sum = 0;
    for (let j = 0; j < width; j++) sum += (weight[i * width + j] as number) * (x[j] as number);
    return sum;
  });
}

/** Numbers of one layer: gamma is one, so that the norm divides by the root mean square alone. */
const norm = (x: Float32Array): Float32Array => x.map((one) => one / Math.sqrt(x.reduce((sum, value) => sum + value * value, 0) / D + 1e-5));
const plus = (a: Float32Array, b: Float32Array): Float32Array => a.map((one, i) => one + (b[i] as number));

export class FakeModel implements Model {
  readonly #weights: Record<string, Float32Array> = {};
  #keys: Float32Array[][] = Array.from({ length: L }, () => []);
  #values: Float32Array[][] = Array.from({ length: L }, () => []);
  /** How many tokens were run, in all. */
  ran = 0;
  readonly config: ModelConfig;

  constructor() {
    const draw = random(7);
    const matrices: Record<string, [number, number]> = Object.assign({ "model.embed_tokens.weight": [V, D] }, ...Array.from({ length: L }, (_, i) => shapes(i)));
    for (const [name, [rows, columns]] of Object.entries(matrices)) this.#weights[name] = Float32Array.from({ length: rows * columns }, () => draw() * 0.7);
    this.#weights["lm_head.weight"] = this.#weights["model.embed_tokens.weight"] as Float32Array;
    const norms = Array.from({ length: L }, (_, i) => ["input_layernorm", "post_attention_layernorm"].map((name) => `model.layers.${i}.${name}.weight`)).flat();
    for (const name of [...norms, "model.norm.weight"]) this.#weights[name] = new Float32Array(D).fill(1);
    const weights = Object.fromEntries(Object.keys(this.#weights).map((name) => [name, { shape: matrices[name] ?? (name === "lm_head.weight" ? [V, D] : [D]), type: "F32", bytes: 0 }]));
    this.config = {
      name: "fake", hidden: D, intermediate: F, layers: L, heads: N, kvHeads: K, headDim: H, vocab: V, context: CONTEXT, maxContext: CONTEXT, window: null,
      normEps: 1e-5, ropeTheta: 10000, frequencies: Float32Array.of(1, 0.01), attentionFactor: 1, tied: true, weights, names: Object.keys(weights),
      kvDtype: "float32", inputBits: 8, tokens: "characters", hasPrefix: false, bosId: null, eosId: null, padId: null, endIds: [], chatTemplate: null, kernels: "fake", threads: 1, warnings: [],
    };
  }

  get length(): number {
    return this.#keys[0]?.length ?? 0;
  }

  encode(text: string): Encoded {
    const pieces = [...text];
    return { ids: pieces.map((one) => CHARACTERS.indexOf(one)), pieces };
  }

  readonly control: ReadonlyMap<string, number> = new Map();

  encodeParts(parts: readonly (string | number)[]): number[] {
    return parts.flatMap((part) => (typeof part === "number" ? [part] : this.encode(part).ids));
  }

  decode(ids: readonly number[]): string {
    return ids.map((id) => CHARACTERS[id]).join("");
  }

  tokenBytes(id: number): Uint8Array {
    return new TextEncoder().encode(CHARACTERS[id]);
  }

  isHidden(): boolean {
    return false;
  }

  piece(id: number): string {
    return CHARACTERS[id] as string;
  }

  run({ ids, start, taps = [], logitRows = "last", edits = [] }: Run): Passed {
    if (start > this.length) throw new Error(`positions ${this.length} to ${start - 1} have not been run`);
    this.reset(start);
    const kept: Record<string, Float32Array[]> = {};
    const streams = ids.map((id, i) => this.#token(id, start + i, edited(edits, start + i), (name, value) => (kept[name] ??= []).push(value)));
    this.ran += ids.length;
    const rows = logitRows === "all" ? streams : logitRows === "last" ? streams.slice(-1) : [];
    const logits = this.readStream(joined(rows));
    const all = (name: string): Float32Array => (name.startsWith("k_rot.") ? joined(this.#keys[Number(name.slice(6))] ?? []) : joined(kept[name] ?? []));
    return { logits, taps: Object.fromEntries(taps.map((name) => [name, all(name)])) };
  }

  #token(id: number, position: number, edit: Edited, tap: (name: string, value: Float32Array) => void): Float32Array {
    let x: Float32Array = edit("embed", null, this.rows("model.embed_tokens.weight", [id]).slice());
    tap("embed", x);
    for (let layer = 0; layer < L; layer++) {
      const of = (name: string, value: Float32Array): Float32Array => (tap(`${name}.${layer}`, value), value);
      const weight = (part: string): Float32Array => this.#weights[`model.layers.${layer}.${part}.weight`] as Float32Array;
      const h = of("attn_norm", norm(x));
      const [q, k, v] = ["q", "k", "v"].map((one) => of(one, times(weight(`self_attn.${one}_proj`), h, D))) as [Float32Array, Float32Array, Float32Array];
      this.#keys[layer]?.push(turned(k, position));
      this.#values[layer]?.push(v);
      const gathered = of("head_out", edit("head", layer, this.#attend(layer, of("q_rot", turned(q, position)))));
      x = of("resid_mid", plus(x, of("attn_out", edit("attention", layer, times(weight("self_attn.o_proj"), gathered, N * H)))));
      const m = of("mlp_norm", norm(x));
      const [gate, up] = ["gate", "up"].map((one) => of(one, times(weight(`mlp.${one}_proj`), m, D))) as [Float32Array, Float32Array];
      const act = of("act", gate.map((one) => one / (1 + Math.exp(-one))));
      const out = times(weight("mlp.down_proj"), of("gated", act.map((one, i) => one * (up[i] as number))), F);
      x = of("resid", edit("residual", layer, plus(x, of("mlp_out", edit("mlp", layer, out)))));
    }
    tap("final_norm", norm(x));
    return x;
  }

  #attend(layer: number, q: Float32Array): Float32Array {
    const out = new Float32Array(N * H);
    for (let head = 0; head < N; head++) {
      const group = Math.floor(head / (N / K)) * H;
      const scores = (this.#keys[layer] ?? []).map((key) => {
        let sum = 0;
        for (let h = 0; h < H; h++) sum += (q[head * H + h] as number) * (key[group + h] as number);
        return Math.exp(sum * H ** -0.5);
      });
      const total = scores.reduce((a, b) => a + b, 0);
      scores.forEach((score, s) => {
        for (let h = 0; h < H; h++) out[head * H + h] = (out[head * H + h] as number) + (score / total) * (this.#values[layer]?.[s]?.[group + h] as number);
      });
    }
    return out;
  }

  reset(toPosition = 0): void {
    this.#keys = this.#keys.map((rows) => rows.slice(0, toPosition));
    this.#values = this.#values.map((rows) => rows.slice(0, toPosition));
  }

  rows(name: string, indices?: readonly number[]): Float32Array {
    const weight = this.#weights[name] as Float32Array;
    const [, width] = this.config.weights[name]?.shape ?? [];
    return width === undefined || !indices ? weight : joined(indices.map((i) => weight.subarray(i * width, (i + 1) * width)));
  }

  product(name: string, x: Float32Array): Float32Array {
    const width = this.config.weights[name]?.shape[1] as number;
    return joined(Array.from({ length: x.length / width }, (_, i) => times(this.#weights[name] as Float32Array, x.subarray(i * width, (i + 1) * width), width)));
  }

  readStream(x: Float32Array): Float32Array {
    return joined(Array.from({ length: x.length / D }, (_, i) => times(this.#weights["lm_head.weight"] as Float32Array, norm(x.subarray(i * D, (i + 1) * D)), D)));
  }

  /** Greedy at temperature 0; else by the seed, whatever it draws. */
  sample(logits: Float32Array, { temperature, seed, step }: Sampling): number {
    if (temperature === 0) return logits.indexOf(Math.max(...logits));
    return (Number(seed) + step) % V;
  }

  close(): void {
    this.reset();
  }
}

type Edited = (part: Part, layer: number | null, value: Float32Array) => Float32Array;

/** What a part computes at a position, with edits: factor times it, plus what is added. */
function edited(edits: readonly Edit[], position: number): Edited {
  return (part, layer, value) => edits.reduce((now, one) => {
    if (one.part !== part || (one.layer ?? null) !== layer || (one.positions && !one.positions.includes(position))) return now;
    const [from, to] = part === "head" ? [(one.head as number) * H, ((one.head as number) + 1) * H] : [0, now.length];
    return now.map((x, i) => (i < from || i >= to ? x : (one.factor ?? 1) * x + (one.add?.[i - from] ?? 0)));
  }, value);
}

function joined(rows: readonly Float32Array[]): Float32Array {
  const all = new Float32Array(rows.reduce((sum, one) => sum + one.length, 0));
  rows.reduce((at, one) => (all.set(one, at), at + one.length), 0);
  return all;
}

/** Pairs of features i and i + H/2 of each head, turned by the angles of a position. */
function turned(x: Float32Array, position: number): Float32Array {
  return x.map((one, i) => {
    const [h, half] = [i % H, H / 2];
    const angle = position * [1, 0.01][h % half]!;
    const other = x[h < half ? i + half : i - half] as number;
    return one * Math.cos(angle) + (h < half ? -other : other) * Math.sin(angle);
  });
}
