/** A Llama's shape and rotation by its header: what llamarium/checkpoints/gguf/config.py and llamarium/rope.py read, with the same bits. */
import { EngineError, shown } from "./errors.ts";
import type { Header, Value } from "./gguf.ts";

export interface Shape {
  vocab: number;
  hidden: number;
  intermediate: number;
  layers: number;
  heads: number;
  kvHeads: number;
  headDim: number;
  normEps: number;
  ropeTheta: number;
  maxContext: number;
  window: number | null;
  tied: boolean;
}

/** What the readers of metadata share. */
export class Metadata {
  readonly warnings: string[] = [];

  constructor(readonly source: string, private readonly values: ReadonlyMap<string, Value>) {}

  get(key: string): Value | undefined {
    return this.values.get(key);
  }

  keys(): Iterable<string> {
    return this.values.keys();
  }

  unsupported(message: string): EngineError {
    return new EngineError("unsupported", `${shown(this.source)}: ${message}`);
  }

  fault(key: string, expected: string): EngineError {
    const value = this.get(key);
    return new EngineError("damaged", `${shown(this.source)}: metadata ${key} ${value === undefined ? "is missing" : `is ${shown(value, 40)}`}; expected ${expected}`);
  }

  integer(key: string, missing?: number): number {
    let value = this.get(key) ?? missing;
    if (Array.isArray(value)) {
      if (!value.every((one) => one === (value as Value[])[0])) throw this.unsupported(`${key} differs by layer; supported is one value for all`);
      value = value[0];
    }
    if (typeof value !== "number" || !Number.isSafeInteger(value)) throw this.fault(key, "a whole number");
    return value;
  }

  positive(key: string, missing?: number): number {
    const value = this.integer(key, missing);
    if (value < 1 || value >= 2 ** 31) throw this.fault(key, "a number above 0");
    return value;
  }

  number(key: string, missing?: number): number {
    const value = this.get(key) ?? missing;
    if (typeof value !== "number" || !Number.isFinite(value)) throw this.fault(key, "a finite number");
    return value;
  }

  text(key: string): string | null {
    const value = this.get(key);
    return typeof value === "string" ? value : null;
  }
}

// Keys that would change the mathematics, and the only values under which they do not.
const FIXED: Readonly<Record<string, readonly Value[]>> = {
  logit_scale: [0, 1], expert_count: [0], expert_used_count: [0], "attention.causal": [true], use_parallel_residual: [false],
};

/** Read the shape; EngineError for another architecture or a value that is not computed. */
export function readShape(metadata: Metadata, header: Header): Shape {
  const architecture = metadata.get("general.architecture");
  if (architecture !== "llama") throw metadata.unsupported(`architecture "${shown(architecture)}"; supported is "llama" only`);
  for (const [key, allowed] of Object.entries(FIXED)) {
    const value = metadata.get(`llama.${key}`) ?? (allowed[0] as Value);
    if (!allowed.includes(value)) throw metadata.unsupported(`llama.${key} is ${shown(value, 40)}; supported is ${String(allowed[0])} only`);
  }
  const table = header.tensors.get("token_embd.weight");
  if (table === undefined) throw new EngineError("damaged", `${shown(metadata.source)}: there is no token_embd.weight; this file holds no whole Llama`);
  const vocab = table.shape[0] ?? 0, hidden = metadata.positive("llama.embedding_length"), heads = metadata.positive("llama.attention.head_count");
  if (metadata.integer("llama.vocab_size", vocab) !== vocab) throw metadata.fault("llama.vocab_size", `${vocab}, the rows of token_embd.weight`);
  const headDim = metadata.positive("llama.attention.key_length", hidden % heads === 0 ? hidden / heads : undefined);
  for (const key of ["llama.attention.value_length", "llama.rope.dimension_count"]) {
    if (metadata.integer(key, headDim) !== headDim) throw metadata.unsupported(`${key} is ${metadata.integer(key)}, but a head is ${headDim} wide; supported is equal only`);
  }
  const maxContext = metadata.positive("llama.context_length"), window = metadata.integer("llama.attention.sliding_window", 0);
  const shape: Shape = {
    vocab, hidden, heads, headDim, maxContext,
    intermediate: metadata.positive("llama.feed_forward_length"), layers: metadata.positive("llama.block_count"),
    kvHeads: metadata.positive("llama.attention.head_count_kv", heads), normEps: metadata.number("llama.attention.layer_norm_rms_epsilon"),
    ropeTheta: metadata.number("llama.rope.freq_base", 10000), window: window > 0 && window < maxContext ? window : null,
    tied: !header.tensors.has("output.weight"),
  };
  if (heads % shape.kvHeads) throw metadata.fault("llama.attention.head_count_kv", `a divisor of ${heads}`);
  if (headDim % 2) throw metadata.unsupported(`a head is ${headDim} wide; expected an even number`);
  if (metadata.get("llama.rope.freq_base") === undefined) metadata.warnings.push("rope.freq_base is not in the file: the format's default, 10000");
  return shape;
}

// --- rotation ---------------------------------------------------------------------------------------------------------

export interface Rotation {
  frequencies: Float32Array;
  attentionFactor: number;
}

const f = Math.fround;

/** theta^(2i/H), each rounded to float32. */
function waves(shape: Shape): Float32Array {
  return Float32Array.from({ length: shape.headDim / 2 }, (_, i) => Math.pow(f(shape.ropeTheta), f((2 * i) / shape.headDim)));
}

/** Llama 3.1's scaling with its published parameters, in the order of operations of rope.py. */
function llama3(plain: Float32Array, factor: number, original: number): Float32Array {
  return plain.map((frequency) => {
    const wavelength = f(f(1 / frequency) * f(2 * Math.PI));
    const kept = Math.min(Math.max(f(f(f(f(1 / wavelength) * original) - 1) / 3), 0), 1);
    return f(f(f(f(1 - kept) * frequency) / f(factor)) + f(kept * frequency));
  });
}

/** Find the parameters of Llama 3.1's scaling that make these divisors. */
function divided(metadata: Metadata, plain: Float32Array, divisors: Float32Array): Float32Array {
  if (divisors.length !== plain.length || !divisors.every(Number.isFinite)) {
    throw new EngineError("damaged", `${shown(metadata.source)}: rope_freqs.weight has ${divisors.length} numbers; expected ${plain.length} finite ones`);
  }
  if (divisors.every((divisor) => divisor === 1)) return plain;
  const original = metadata.integer("llama.rope.scaling.original_context_length", 8192);
  for (const factor of new Set([Math.max(...divisors), 8, 32])) {
    const scaled = llama3(plain, factor, original);
    const fits = (divisor: number, i: number) => Math.abs((plain[i] ?? 0) / (scaled[i] ?? 1) - divisor) <= 2e-5 * Math.abs(divisor);
    if (factor >= 1 && divisors.every(fits)) return scaled;
  }
  throw metadata.unsupported("the divisors in rope_freqs.weight are not those of Llama 3.1's scaling");
}

/** Pairs with many turns over the original context are kept, those with few divided, with a blend between. */
function yarn(metadata: Metadata, shape: Shape, factor: number): Rotation {
  const key = (name: string) => `llama.rope.scaling.${name}`;
  if (metadata.number(key("yarn_ext_factor"), 1) !== 1) throw metadata.unsupported(`${key("yarn_ext_factor")}: supported is 1 only`);
  const original = metadata.integer(key("original_context_length"), shape.maxContext) || shape.maxContext;
  const pair = (turns: number) => (shape.headDim * Math.log(original / (turns * 2 * Math.PI))) / (2 * Math.log(shape.ropeTheta));
  const low = Math.max(Math.floor(pair(metadata.number(key("yarn_beta_fast"), 32))), 0);
  const last = Math.min(Math.ceil(pair(metadata.number(key("yarn_beta_slow"), 1))), shape.headDim - 1), high = last === low ? last + 0.001 : last;
  const frequencies = waves(shape).map((wave, i) => {
    const part = Math.min(Math.max(f(f(i - f(low)) / f(high - low)), 0), 1), kept = f(1 - part);
    return f(f(f(1 / f(f(factor) * wave)) * f(1 - kept)) + f(f(1 / wave) * kept));
  });
  const log = metadata.number(key("yarn_log_multiplier"), 0), magnitude = (scale: number) => (factor <= 1 ? 1 : 0.1 * scale * Math.log(factor) + 1);
  const attentionFactor = f((metadata.number(key("attn_factor"), 1) * magnitude(1)) / (log ? magnitude(log) : 1));
  return { frequencies, attentionFactor };
}

/** Radians a position of each pair, with the file's scaling; `divisors` is rope_freqs.weight, if there is one. */
export function readRotation(metadata: Metadata, shape: Shape, divisors: Float32Array | null): Rotation {
  const plain = waves(shape).map((wave) => f(1 / wave)), prefix = "llama.rope.scaling.";
  const kind = metadata.get(`${prefix}type`) ?? "linear";
  const factor = metadata.number(`${prefix}factor`, metadata.number("llama.rope.scale_linear", 0)) || 1;
  const isScaled = kind === "yarn" || (kind === "linear" && factor !== 1);
  if (kind !== "none" && kind !== "linear" && kind !== "yarn") throw metadata.unsupported(`${prefix}type is ${shown(kind, 40)}; supported are none, linear and yarn`);
  if (kind !== "yarn" && metadata.number(`${prefix}attn_factor`, 1) !== 1) throw metadata.unsupported(`${prefix}attn_factor without yarn; expected 1`);
  if (divisors !== null && isScaled) throw metadata.unsupported("RoPE is scaled twice, by rope_freqs.weight and by its scaling; expected one");
  if (divisors !== null) return { frequencies: divided(metadata, plain, divisors), attentionFactor: 1 };
  if (kind === "yarn") return yarn(metadata, shape, factor);
  return { frequencies: isScaled ? plain.map((frequency) => f(frequency / f(factor))) : plain, attentionFactor: 1 };
}
