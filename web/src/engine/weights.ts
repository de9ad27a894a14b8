/** A model's weights from a file into the kernels' memory, packed piece by piece, so that a file is never in memory as well. */
import type { Shape } from "./config.ts";
import { EngineError, shown } from "./errors.ts";
import { cast, type FloatType } from "./floats.ts";
import type { Header, Tensor } from "./gguf.ts";
import type { Kernels } from "./kernels.ts";
import { CODEBOOK, KINDS, PANEL_ROWS, type Kind, type Values } from "./layout.ts";
import type { Progress } from "./types.ts";

export interface Weight {
  shape: readonly number[];
  /** As it is held. */
  type: string;
  kind: number;
  at: number;
  bytes: number;
}

const LINEARS = {
  q: ["attn_q", "self_attn.q_proj"], k: ["attn_k", "self_attn.k_proj"], v: ["attn_v", "self_attn.v_proj"],
  o: ["attn_output", "self_attn.o_proj"], gate: ["ffn_gate", "mlp.gate_proj"], up: ["ffn_up", "mlp.up_proj"],
  down: ["ffn_down", "mlp.down_proj"],
} as const;

export type Linear = keyof typeof LINEARS;

export const linearKey = (layer: number, name: Linear) => `model.layers.${layer}.${LINEARS[name][1]}`;
export const NORMS = ["input_layernorm", "post_attention_layernorm"] as const;
export const EMBEDDING = "model.embed_tokens.weight", HEAD = "lm_head.weight", FINAL_NORM = "model.norm.weight", DIVISORS = "rope_freqs.weight";

const PIECE = 2 ** 22; // bytes that are read at a time
const MOST_BYTES = 2 ** 32 - 2 ** 26; // of a memory with addresses of 32 bits

interface Part {
  key: string;
  shape: readonly number[];
  /** Whose rows GGUF has in the order of RoPE's pairs. */
  heads?: number;
  isOptional?: boolean;
}

/** Which tensors a model of this shape has, by their names in the file. */
function expected(shape: Shape): Map<string, Part> {
  const { hidden, intermediate, heads, kvHeads, headDim } = shape, queries = heads * headDim, keys = kvHeads * headDim;
  const sizes: Record<Linear, [number, number]> = {
    q: [queries, hidden], k: [keys, hidden], v: [keys, hidden], o: [hidden, queries], gate: [intermediate, hidden], up: [intermediate, hidden],
    down: [hidden, intermediate],
  };
  const parts = new Map<string, Part>([
    ["token_embd.weight", { key: EMBEDDING, shape: [shape.vocab, hidden] }], ["output_norm.weight", { key: FINAL_NORM, shape: [hidden] }],
  ]);
  if (!shape.tied) parts.set("output.weight", { key: HEAD, shape: [shape.vocab, hidden] });
  for (let layer = 0; layer < shape.layers; layer++) {
    parts.set(`blk.${layer}.attn_norm.weight`, { key: `model.layers.${layer}.${NORMS[0]}.weight`, shape: [hidden] });
    parts.set(`blk.${layer}.ffn_norm.weight`, { key: `model.layers.${layer}.${NORMS[1]}.weight`, shape: [hidden] });
    for (const name of Object.keys(LINEARS) as Linear[]) {
      const key = linearKey(layer, name), own = `blk.${layer}.${LINEARS[name][0]}`;
      const moved = name === "q" ? { heads } : name === "k" ? { heads: kvHeads } : {};
      parts.set(`${own}.weight`, { key: `${key}.weight`, shape: sizes[name], ...moved });
      parts.set(`${own}.bias`, { key: `${key}.bias`, shape: [sizes[name][0]], isOptional: true, ...moved });
    }
  }
  return parts;
}

// Parts of a layer that other architectures have: without them, the model would compute something else.
const OTHER_PARTS = /\bblk\.\d+\..*(norm\b|experts?\b|_exps\b|_shexp\b|gate_inp|router|lora_|\.bias$)/;

/** Compare the file's tensors with those that the shape implies; returns what to warn of. */
function check(header: Header, parts: ReadonlyMap<string, Part>, source: string): string[] {
  const list = (names: string[]) => names.slice(0, 10).map((name) => shown(name)).join(", ") + (names.length > 10 ? ", ..." : "");
  const missing = [...parts].filter(([name, part]) => part.isOptional !== true && !header.tensors.has(name)).map(([name]) => name);
  if (missing.length) throw new EngineError("damaged", `${shown(source)}: ${missing.length} tensors are missing: ${list(missing)}; the file is incomplete`);
  for (const [name, { shape }] of parts) {
    const tensor = header.tensors.get(name);
    if (tensor === undefined || (tensor.shape.length === shape.length && tensor.shape.every((size, i) => size === shape[i]))) continue;
    throw new EngineError("damaged", `${shown(source)}: ${shown(name)} is ${tensor.shape.join(" x ")}; the metadata says ${shape.join(" x ")}`);
  }
  const extra = [...header.tensors.keys()].filter((name) => !parts.has(name) && name !== DIVISORS && !/attn_rot_embd|^rope\.freqs$/.test(name));
  const changing = extra.filter((name) => OTHER_PARTS.test(name));
  if (changing.length) throw new EngineError("unsupported", `${shown(source)}: ${changing.length} tensors would change the results, and a Llama has no such parts: ${list(changing)}`);
  return extra.length ? [`${extra.length} tensors are not used by this model: ${list(extra)}`] : [];
}

/** Rows of q or k from the order of RoPE's pairs into halves: a head's rows 2i and 2i + 1 become its rows i and i + H/2. */
function unpermuted(rows: Uint8Array, heads: number, numRows: number): Uint8Array {
  const out = new Uint8Array(rows.length), width = rows.length / numRows, size = numRows / heads, half = size / 2;
  for (let row = 0; row < numRows; row++) {
    const head = Math.floor(row / size), i = row % size, from = head * size + (i < half ? 2 * i : 2 * (i - half) + 1);
    out.set(rows.subarray(from * width, (from + 1) * width), row * width);
  }
  return out;
}

export interface Loaded {
  weights: Map<string, Weight>;
  divisors: Float32Array | null;
  warnings: string[];
}

/** The dtype of a file's model: as its Linears are stored, bfloat16 where they are quantized. What is stored as other floats is cast. */
export function naturalType(header: Header): FloatType {
  const name = header.tensors.get("blk.0.attn_q.weight")?.kind.name;
  return name === "F32" || name === "F16" ? name : "BF16";
}

/** Reads tensors in the order in which they lie. */
class Loader {
  private done = 0;
  readonly total: number;

  constructor(private readonly kernels: Kernels, private readonly header: Header, private readonly dtype: FloatType, private readonly onProgress: ((progress: Progress) => void) | undefined) {
    this.total = [...header.tensors.values()].reduce((sum, { bytes }) => sum + bytes, 0);
  }

  async read(offset: number, bytes: number): Promise<Uint8Array> {
    const read = await this.header.reader.read(offset, bytes);
    this.done += bytes;
    this.onProgress?.({ done: this.done, total: this.total });
    return read;
  }

  /** A matrix of floats as rows of the model's dtype. */
  private async floats(tensor: Tensor, heads: number | undefined): Promise<Weight> {
    const { kernels, dtype } = this, [rows = 0, cols = 0] = tensor.shape, from = tensor.kind.name as FloatType, rowBytes = tensor.bytes / rows;
    const to = kindOf(dtype), width = cols * to.bytes, at = kernels.take(rows * width, tensor.name);
    const atOnce = heads === undefined ? Math.max(1, Math.floor(PIECE / rowBytes)) : rows; // heads move within them
    for (let first = 0; first < rows; first += atOnce) {
      const count = Math.min(atOnce, rows - first), read = await this.read(tensor.offset + first * rowBytes, count * rowBytes);
      kernels.bytes.set(cast(heads === undefined ? read : unpermuted(read, heads, rows), from, dtype), at + first * width);
    }
    return { shape: tensor.shape, type: dtype, kind: to.kind, at, bytes: rows * width };
  }

  /** A norm of the model's dtype, or, where C has none of it, as a bias float32. */
  private async vector(tensor: Tensor, part: Part): Promise<Weight> {
    const read = await this.read(tensor.offset, tensor.bytes), moved = part.heads === undefined ? read : unpermuted(read, part.heads, tensor.shape[0] ?? 0);
    const rounded = cast(moved, tensor.kind.name as FloatType, this.dtype);
    const type = this.dtype === "BF16" && part.key.endsWith("norm.weight") ? "BF16" : "F32";
    const bytes = cast(rounded, this.dtype, type), at = this.kernels.take(bytes.length, tensor.name);
    this.kernels.bytes.set(bytes, at);
    return { shape: tensor.shape, type, kind: kindOf(type).kind, at, bytes: bytes.length };
  }

  /** A matrix of blocks as tiles. */
  private async tiles(tensor: Tensor, heads: number | undefined): Promise<Weight> {
    const { kernels } = this, [rows = 0, cols = 0] = tensor.shape, rowBytes = tensor.bytes / rows, { kind } = tensor.kind;
    const bytes = Math.ceil(rows / PANEL_ROWS) * PANEL_ROWS * rowBytes, at = kernels.take(bytes, tensor.name);
    const atOnce = heads === undefined ? Math.max(1, Math.floor(PIECE / rowBytes / PANEL_ROWS)) * PANEL_ROWS : rows;
    const staged = kernels.take(Math.min(atOnce, rows) * rowBytes, tensor.name);
    try {
      for (let first = 0; first < rows; first += atOnce) {
        const count = Math.min(atOnce, rows - first), read = await this.read(tensor.offset + first * rowBytes, count * rowBytes);
        kernels.bytes.set(heads === undefined ? read : unpermuted(read, heads, rows), staged);
        kernels.pack(kind, count, cols, staged, at + first * rowBytes);
      }
    } finally {
      kernels.give(staged);
    }
    return { shape: tensor.shape, type: tensor.kind.name, kind, at, bytes };
  }

  async weight(tensor: Tensor, part: Part): Promise<Weight> {
    const isFloat = tensor.kind.block === 1;
    if (tensor.shape.length > 1) return isFloat ? this.floats(tensor, part.heads) : this.tiles(tensor, part.heads);
    if (isFloat) return this.vector(tensor, part);
    throw new EngineError("unsupported", `${shown(this.header.reader.name)}: ${shown(tensor.name)} is ${tensor.kind.name}; expected floats for a norm or a bias`);
  }
}

const kindOf = (type: FloatType): Kind => KINDS.find(({ name }) => name === type) as Kind;

/** Read all weights. */
export async function loadWeights(kernels: Kernels, header: Header, shape: Shape, onProgress?: (progress: Progress) => void): Promise<Loaded> {
  const { reader, tensors } = header;
  if (tensors.size < 9 * shape.layers) {
    throw new EngineError("damaged", `${shown(reader.name)}: ${tensors.size} tensors for ${shape.layers} layers; the file is incomplete`);
  }
  const parts = expected(shape), warnings = check(header, parts, reader.name), loader = new Loader(kernels, header, naturalType(header), onProgress);
  if (loader.total > MOST_BYTES) throw new EngineError("no-memory", `${shown(reader.name)}: ${Math.round(loader.total / 2 ** 20)} MB of weights; a browser's WebAssembly holds 4096 MB: use a smaller model or type`);
  const weights = new Map<string, Weight>();
  let divisors: Float32Array | null = null;
  for (const tensor of tensors.values()) {
    const part = parts.get(tensor.name);
    if (part !== undefined) weights.set(part.key, await loader.weight(tensor, part));
    if (tensor.name !== DIVISORS) continue;
    if (tensor.kind.name !== "F32") throw new EngineError("damaged", `${shown(reader.name)}: ${DIVISORS} is ${tensor.kind.name}; expected F32`);
    divisors = new Float32Array((await loader.read(tensor.offset, tensor.bytes)).slice().buffer);
  }
  return { weights, divisors, warnings };
}

/** The fields of lm_matrix. */
export function matrixValues(weight: Weight, codebook: number, bias: number): Values {
  const [rows = 0, cols = 0] = weight.shape;
  return { kind: weight.kind, rows, cols, data: weight.at, codebook: weight.type.startsWith("IQ4") ? codebook : 0, bias };
}

/** What IQ4's codes stand for, in memory. */
export function putCodebook(kernels: Kernels): number {
  const at = kernels.take(CODEBOOK.length, "a codebook");
  kernels.bytes.set(CODEBOOK, at);
  return at;
}

