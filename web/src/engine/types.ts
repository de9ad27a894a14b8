/**
 * A Llama that runs where this code runs: in a Web Worker or in Node, by the C kernels as WebAssembly. Nothing here needs the DOM.
 *
 * A call that computes blocks its thread; in a page it belongs in a worker. All numbers are float32, computed as the local server
 * computes them with the `portable` kernels: the same bits.
 */

/** Where a GGUF file is: a dropped file, bytes in memory, or an address that is read by range requests. */
export type Source = Blob | ArrayBuffer | URL;

/** The compiled kernels (`kernels.wasm`), or their address. One compiled module serves any number of models. */
export type Kernels = WebAssembly.Module | URL;

/** How far opening has come: bytes of weights that are read and packed, of all. */
export interface Progress {
  done: number;
  total: number;
}

/** What opening may be told besides the source. */
export interface OpenOptions {
  onProgress?: (progress: Progress) => void;
  /** Longest text in tokens; at most the model's context length. Default: the model's, up to 2048. Bounds the KV cache. */
  context?: number;
  /** A name for messages. Default: the Blob's name, or the last part of the address. */
  name?: string;
  /** Compute with several threads. Where they cannot be started, one computes, and a warning of the model says why. */
  threading?: Threading;
}

/** What a thread begins with. */
export interface ThreadStart {
  module: WebAssembly.Module;
  memory: WebAssembly.Memory;
  /** From 1 on; thread 0 runs the engine. */
  index: number;
  /** The end of its stack, and its thread-local variables, in memory. */
  stack: number;
  locals: number;
}

/** A worker that runs `runThread` (threads.ts) with what it is sent. */
export interface Thread {
  /** Resolves when it is ready. */
  start(given: ThreadStart): Promise<void>;
  end(): void;
}

export interface Threading {
  /** The kernels for several threads. */
  kernels: Kernels;
  /** Threads in all, the engine's included. */
  count: number;
  newThread(): Thread;
}

export type ErrorCode =
  | "damaged" // the file is malformed or cut short
  | "unsupported" // a readable file that this engine cannot run: another architecture, type or tokenizer
  | "no-simd" // no WebAssembly with SIMD
  | "no-memory" // the model or a pass does not fit into memory
  | "network" // the address does not answer, or answers without the file
  | "input"; // an argument: an id, a position, a tap, an edit

/** What is wrong, where, and what to do, in one sentence. Survives `postMessage` as `{name, message, code}`. */
export interface EngineErrorLike {
  name: "EngineError";
  message: string;
  code: ErrorCode;
}

/** A weight of the model under its state-dict name, such as `model.layers.0.self_attn.q_proj.weight`. */
export interface WeightInfo {
  /** (out, in), or a norm's (hidden). */
  shape: readonly number[];
  /** How it is stored and multiplied: `F32`, `F16`, `BF16`, `Q8_0`, `Q4_1`, ... */
  type: string;
  /** In memory. */
  bytes: number;
}

export interface ModelConfig {
  /** `general.name` of the file, else the source's name. */
  name: string;
  hidden: number;
  intermediate: number;
  layers: number;
  heads: number;
  kvHeads: number;
  headDim: number;
  vocab: number;
  /** Positions of the KV cache: `OpenOptions.context`. */
  context: number;
  /** What the model was trained for. */
  maxContext: number;
  /** How many positions a token sees, its own the last; null: all. */
  window: number | null;
  normEps: number;
  ropeTheta: number;
  /** Radians a position, (headDim / 2): after any scaling of RoPE. */
  frequencies: Float32Array;
  attentionFactor: number;
  /** Whether the head is the embedding table. */
  tied: boolean;
  /** Every weight by its name; `names` are its keys in the order of the file. A tied `lm_head.weight` is the embedding's. */
  weights: Readonly<Record<string, WeightInfo>>;
  names: readonly string[];
  /** dtype of the KV cache. */
  kvDtype: "float32" | "bfloat16";
  /** What inputs of packed weights are rounded to. */
  inputBits: 8;
  /** What a token is; null: a vocabulary that is not read here, so that only ids can be run, and a warning says why. */
  tokens: "characters" | "bpe" | "sentencepiece" | "words" | null;
  /** Whether a space is put before a text, which a new text does not show. */
  hasPrefix: boolean;
  bosId: number | null;
  eosId: number | null;
  padId: number | null;
  /** Tokens that end a text or an answer. */
  endIds: readonly number[];
  /** The file's chat template (Jinja), if it has one. */
  chatTemplate: string | null;
  /** Of the kernels: "simd128". */
  kernels: string;
  /** How many threads compute. */
  threads: number;
  /** Sentences to show once: what was defaulted or ignored. */
  warnings: readonly string[];
}

export interface Encoded {
  ids: number[];
  /** A printable piece for each id, as the server's pages show it: control characters and stray bytes as `\n` or `\xe4`. */
  pieces: string[];
}

export interface EncodeOptions {
  /** Put BOS first where the vocabulary has it so. Default: true. */
  bos?: boolean;
  /** Read spellings of control tokens as control tokens: only for text that a program wrote. Default: false. */
  special?: boolean;
}

/** The activations that a pass hands out, named as in Python (`llamarium.runtime.taps`). */
export type LayerTap =
  | "attn_norm" | "q" | "k" | "v" | "q_rot" | "head_out" | "attn_out" | "resid_mid"
  | "mlp_norm" | "gate" | "up" | "act" | "gated" | "mlp_out" | "resid";

/**
 * A tap: `embed`, `final_norm`, or `NAME.LAYER` such as `resid.3`. `k_rot.LAYER` is read from the KV cache: positions 0 to the last
 * one, (tokens so far, kvHeads, headDim).
 */
export type Tap = string;

export type Part = "embed" | "attention" | "head" | "mlp" | "residual";

/** What a part computes, times `factor`, plus `add`. The same fields as the page's edits. */
export interface Edit {
  part: Part;
  layer?: number | null;
  head?: number | null;
  /** Default: 1. 0 takes it away. */
  factor?: number;
  /** (hidden), of a head (headDim). */
  add?: Float32Array | null;
  /** Of the text, from its beginning; null or none: all. */
  positions?: readonly number[] | null;
}

export interface Run {
  ids: readonly number[];
  /** Position of the first id. Positions before it must have been run; those from it on are forgotten. */
  start: number;
  taps?: readonly Tap[];
  edits?: readonly Edit[];
  /** Default: "last". "none" fills the cache. */
  logitRows?: "last" | "all" | "none";
}

export interface Passed {
  /** (rows, vocab): one row, or one for each id. */
  logits: Float32Array;
  /** By the names asked for: (ids, width), row-major. */
  taps: Record<Tap, Float32Array>;
}

export interface Sampling {
  /** 0: the most likely token. */
  temperature: number;
  /** 1: all. */
  topP?: number;
  /** 0: all. */
  topK?: number;
  minP?: number;
  /** Up to 2^53 as a number; larger ones as a bigint. */
  seed: number | bigint;
  /** How many tokens this answer has so far: a draw depends on seed and step alone. */
  step: number;
}

/** A model that is open, with one KV cache. Every method is synchronous and throws `EngineError`. */
export interface Model {
  readonly config: ModelConfig;
  encode(text: string, options?: EncodeOptions): Encoded;
  /** The ids of texts and of control tokens that are one string, without BOS. No text becomes a control token. */
  encodeParts(parts: readonly (string | number)[]): number[];
  /** The control tokens by their spelling. */
  readonly control: ReadonlyMap<string, number>;
  /** Bytes that are no UTF-8 become U+FFFD; control tokens are left out unless `special`. */
  decode(ids: readonly number[], options?: { special?: boolean }): string;
  /** The bytes of one token: for streams, which hold back incomplete characters. */
  tokenBytes(id: number): Uint8Array;
  /** Whether a text does not show this token: a control token. */
  isHidden(id: number): boolean;
  /** A printable piece for one id. */
  piece(id: number): string;
  /** Run tokens through the model, over the KV cache. */
  run(run: Run): Passed;
  /** How many positions the KV cache holds. */
  readonly length: number;
  /** Forget positions from `toPosition` on. Default: 0. */
  reset(toPosition?: number): void;
  /** Rows of a weight as float32, (indices, in). Of a vector all numbers; `indices` is ignored. */
  rows(name: string, indices?: readonly number[]): Float32Array;
  /** y = W x, without a bias, as the pass multiplies: x (n, in) -> (n, out). */
  product(name: string, x: Float32Array): Float32Array;
  /** Logits (n, vocab) of rows of the residual stream (n, hidden): the last norm and the head. */
  readStream(x: Float32Array): Float32Array;
  /** Choose a token from one row of logits: the same as the Python engine for the same seed. */
  sample(logits: Float32Array, sampling: Sampling): number;
  /** Give its memory back; nothing else may be called afterwards. */
  close(): void;
}

export type OpenModel = (
  source: Source, kernels: Kernels, options?: OpenOptions | ((progress: Progress) => void),
) => Promise<Model>;
