import type { Rotation, Shape } from "./config.ts";
import { EngineError, shown } from "./errors.ts";
import { fromBfloat16 } from "./floats.ts";
import type { Kernels } from "./kernels.ts";
import { DTYPES, layoutOf, PARTS, TAPS_OF_A_LAYER, type Values } from "./layout.ts";
import { normalised } from "./stream.ts";
import type { Tokenizer } from "./tokenizer/index.ts";
import type { Edit, Encoded, EncodeOptions, Model, ModelConfig, Passed, Run, Sampling, Tap } from "./types.ts";
import { EMBEDDING, FINAL_NORM, HEAD, linearKey, matrixValues, NORMS, putCodebook, type Linear, type Weight } from "./weights.ts";

const BLOCK = 256; // positions of a block of the KV cache
const INPUT_BITS = 8;
const MOST_LOGITS = 2 ** 28; // numbers of one pass

interface Parts {
  kernels: Kernels;
  shape: Shape;
  rotation: Rotation;
  weights: Map<string, Weight>;
  tokenizer: Tokenizer | null;
  config: ModelConfig;
}

function bad(message: string): EngineError {
  return new EngineError("input", message);
}

function checkIndex(name: string, value: unknown, size: number): number {
  if (typeof value === "number" && Number.isInteger(value) && value >= 0 && value < size) return value;
  throw bad(`${name} is ${shown(value)}; expected a whole number within 0..${size - 1}`);
}

/** Where a tap's numbers are put, and how many a token has. */
interface TapPlace {
  name: Tap;
  at: number;
  width: number;
  /** In lm_taps.layers, or which of the others. */
  slot: number | "embed" | "final_norm";
}

/** A model over the kernels' memory. */
export class NativeModel implements Model {
  readonly config: ModelConfig;
  private readonly kernels: Kernels;
  private readonly shape: Shape;
  private readonly weights: Map<string, Weight>;
  private readonly tokenizer: Tokenizer | null;
  private readonly codebook: number;
  private readonly model: number;
  private readonly cache: number;
  private readonly keys: number[]; // of each layer
  private readonly table: number; // of the one sequence's blocks
  private readonly numBlocks: number;
  private positions = 0;
  private isClosed = false;

  constructor({ kernels, shape, rotation, weights, tokenizer, config }: Parts) {
    this.kernels = kernels;
    this.shape = shape;
    this.weights = weights;
    this.tokenizer = tokenizer;
    this.config = config;
    this.codebook = putCodebook(kernels);
    this.numBlocks = Math.ceil(config.context / BLOCK);
    this.model = this.putModel(rotation);
    const bytes = this.numBlocks * BLOCK * shape.kvHeads * shape.headDim * (config.kvDtype === "float32" ? 4 : 2);
    const take = () => Array.from({ length: shape.layers }, () => kernels.take(bytes, "the KV cache"));
    this.keys = take();
    this.table = this.putPointers(Array.from({ length: this.numBlocks }, (_, i) => i));
    const dtype = DTYPES[config.kvDtype];
    this.cache = kernels.put("lm_cache", {
      k_dtype: dtype, v_dtype: dtype, num_blocks: this.numBlocks, block_size: BLOCK, k: this.putPointers(this.keys), v: this.putPointers(take()),
    });
  }

  get length(): number {
    return this.positions;
  }

  // --- text ---------------------------------------------------------------------------------------------------------

  encode(text: string, options: EncodeOptions = {}): Encoded {
    const ids = this.vocabulary.encode(text, options);
    return { ids, pieces: ids.map((id) => this.piece(id)) };
  }

  encodeParts(parts: readonly (string | number)[]): number[] {
    return this.vocabulary.encodeParts(parts);
  }

  get control(): ReadonlyMap<string, number> {
    return this.tokenizer?.control ?? new Map();
  }

  decode(ids: readonly number[], options: { special?: boolean } = {}): string {
    ids.forEach((id) => checkIndex("an id", id, this.shape.vocab));
    return this.vocabulary.decode(ids, options.special ?? false);
  }

  tokenBytes(id: number): Uint8Array {
    return this.vocabulary.bytes(checkIndex("an id", id, this.shape.vocab)) ?? new Uint8Array();
  }

  isHidden(id: number): boolean {
    return this.vocabulary.isHidden(id);
  }

  piece(id: number): string {
    return this.vocabulary.piece(checkIndex("an id", id, this.shape.vocab));
  }

  private get vocabulary(): Tokenizer {
    if (this.tokenizer !== null) return this.tokenizer;
    throw new EngineError("unsupported", `${shown(this.config.name)}: its vocabulary is not read here; give ids, or use the installed Llamarium`);
  }

  // --- passes -------------------------------------------------------------------------------------------------------

  reset(toPosition = 0): void {
    this.positions = Math.min(this.positions, checkIndex("toPosition", toPosition, this.config.context + 1));
  }

  run({ ids, start, taps = [], edits = [], logitRows = "last" }: Run): Passed {
    this.checkRun(ids, start);
    const { kernels, shape } = this, count = ids.length;
    const rows = logitRows === "all" ? count : logitRows === "last" ? 1 : 0;
    if (rows * shape.vocab > MOST_LOGITS) throw new EngineError("no-memory", `${rows} rows of ${shape.vocab} logits are more than fit; ask for the last row, or run fewer tokens at once`);
    this.positions = start; // of a pass that fails nothing is kept
    return kernels.scoped((take) => {
      const logits = take(4 * rows * shape.vocab, "logits"), places = this.takeTaps(taps, count, take);
      const batch = take(layoutOf("lm_batch").size, "a batch");
      const tokens = take(8 * count, "a batch"), numbers = take(4 * (2 * count + rows), "a batch");
      kernels.putIds(tokens, ids);
      kernels.ints(numbers, 2 * count + rows).forEach((_, i, all) => {
        all[i] = i < count ? start + i : i < 2 * count ? 0 : count - rows + (i - 2 * count);
      });
      kernels.write("lm_batch", batch, {
        num_tokens: count, num_sequences: 1, table_stride: this.numBlocks, num_logits: rows, token_ids: tokens, positions: numbers,
        sequences: numbers + 4 * count, block_tables: this.table, logit_rows: numbers + 8 * count, edits: this.putEdits(edits, take),
      });
      kernels.run(this.model, this.cache, batch, this.putTaps(places, take), logits);
      this.positions = start + count;
      const kept = places.map(({ name, at, width }): [Tap, Float32Array] => [name, kernels.floats(at, count * width).slice()]);
      for (const name of taps) if (name.startsWith("k_rot.")) kept.push([name, this.cachedKeys(this.layerOf(name))]);
      return { logits: kernels.floats(logits, rows * shape.vocab).slice(), taps: Object.fromEntries(kept) };
    });
  }

  sample(logits: Float32Array, { temperature, topP = 1, topK = 0, minP = 0, seed, step }: Sampling): number {
    const { kernels, shape } = this;
    if (logits.length !== shape.vocab) throw bad(`${logits.length} logits; expected a row of ${shape.vocab}`);
    checkSampling({ temperature, topP, topK, minP, seed, step });
    return kernels.scoped((take) => {
      const at = take(4 * shape.vocab, "logits"), how = take(layoutOf("lm_choice").size, "a choice"), id = take(4, "a choice");
      kernels.floats(at, shape.vocab).set(logits);
      kernels.write("lm_choice", how, {
        temperature, min_p: minP, top_k: topK < shape.vocab ? topK : 0, top_p: topP, seed, step,
      });
      kernels.choose(at, shape.vocab, how, id);
      const chosen = kernels.ints(id, 1)[0] ?? -1;
      if (chosen < 0) throw bad("the logits are not finite; the model cannot go on here");
      return chosen;
    });
  }

  // --- weights ------------------------------------------------------------------------------------------------------

  rows(name: string, indices: readonly number[] = []): Float32Array {
    const weight = this.weight(name), { kernels } = this, [count = 0, width = 0] = weight.shape;
    if (weight.shape.length === 1) return this.vector(weight);
    indices.forEach((index) => checkIndex(`a row of ${shown(name)}`, index, count));
    return kernels.scoped((take) => {
      const wanted = take(8 * indices.length, "rows"), out = take(4 * indices.length * width, "rows");
      kernels.putIds(wanted, indices);
      kernels.lookup(this.takeMatrix(weight, take), wanted, indices.length, out);
      return kernels.floats(out, indices.length * width).slice();
    });
  }

  product(name: string, x: Float32Array): Float32Array {
    const weight = this.weight(name), { kernels } = this, [out = 0, width = 0] = weight.shape, count = x.length / width;
    if (weight.shape.length === 1 || !Number.isInteger(count)) throw bad(`${x.length} numbers times ${shown(name)}, ${weight.shape.join(" x ")}; expected rows of its last size`);
    return kernels.scoped((take) => {
      const inputs = take(4 * x.length, "inputs"), y = take(4 * count * out, "a product");
      kernels.floats(inputs, x.length).set(x);
      kernels.product(this.takeMatrix(weight, take), inputs, count, INPUT_BITS, y);
      return kernels.floats(y, count * out).slice();
    });
  }

  readStream(x: Float32Array): Float32Array {
    if (x.length % this.shape.hidden) throw bad(`${x.length} numbers of the stream; expected rows of ${this.shape.hidden}`);
    return this.product(HEAD, normalised(x, this.rows(FINAL_NORM), this.shape.normEps));
  }

  close(): void {
    this.isClosed = true; // the memory is given back with the kernels, which nobody else has
    this.kernels.end();
    this.weights.clear();
  }

  private weight(name: string): Weight {
    const weight = this.weights.get(name === HEAD && this.shape.tied ? EMBEDDING : name);
    if (weight !== undefined) return weight;
    throw bad(this.isClosed ? "the model is closed; open it again" : `there is no weight ${shown(name)}; config.names lists them`);
  }

  private vector({ type, at, shape: [count = 0] }: Weight): Float32Array {
    if (type === "F32") return this.kernels.floats(at, count).slice();
    const bits = new Uint16Array(this.kernels.bytes.buffer, at, count); // BF16
    return Float32Array.from(bits, fromBfloat16);
  }

  private takeMatrix(weight: Weight, take: (size: number, what: string) => number): number {
    const at = take(layoutOf("lm_matrix").size, "a matrix");
    this.kernels.write("lm_matrix", at, matrixValues(weight, this.codebook, 0));
    return at;
  }

  // --- what C is given ----------------------------------------------------------------------------------------------

  private putPointers(all: readonly number[]): number {
    const at = this.kernels.take(4 * all.length, "pointers");
    this.kernels.ints(at, all.length).set(all);
    return at;
  }

  private matrix(name: string): Values {
    const bias = this.weights.get(`${name.replace(/\.weight$/, "")}.bias`);
    return matrixValues(this.weight(name), this.codebook, bias?.at ?? 0);
  }

  private putModel({ frequencies, attentionFactor }: Rotation): number {
    const { kernels, shape } = this, at = kernels.take(4 * frequencies.length, "frequencies");
    kernels.floats(at, frequencies.length).set(frequencies);
    const layers = Array.from({ length: shape.layers }, (_, layer): Values => {
      const linears = (["q", "k", "v", "o", "gate", "up", "down"] as Linear[]).map((name) => [name, this.matrix(`${linearKey(layer, name)}.weight`)]);
      const [attention_norm, mlp_norm] = NORMS.map((norm) => this.weight(`model.layers.${layer}.${norm}.weight`).at);
      return { attention_norm: attention_norm as number, mlp_norm: mlp_norm as number, ...(Object.fromEntries(linears) as Values) };
    });
    return kernels.put("lm_model", {
      num_layers: shape.layers, hidden: shape.hidden, intermediate: shape.intermediate, num_heads: shape.heads, num_kv_heads: shape.kvHeads,
      head_dim: shape.headDim, norm_eps: shape.normEps, norm_dtype: DTYPES[this.config.kvDtype], frequencies: at, attention_factor: attentionFactor,
      final_norm: this.weight(FINAL_NORM).at, layers: kernels.put("lm_layer", ...layers), table: this.matrix(EMBEDDING), head: this.matrix(HEAD),
      input_bits: INPUT_BITS, window: shape.window ?? 0,
    });
  }

  private checkRun(ids: readonly number[], start: number): void {
    if (this.isClosed) throw bad("the model is closed; open it again");
    if (ids.length === 0) throw bad("there are no ids to run; expected at least one");
    ids.forEach((id) => checkIndex("an id", id, this.shape.vocab));
    checkIndex("start", start, this.positions + 1);
    if (start + ids.length <= this.config.context) return;
    throw bad(`the text is too long: ${start + ids.length} tokens; ${this.config.context} fit (context)`);
  }

  private layerOf(name: Tap): number {
    return checkIndex(`the layer of ${shown(name)}`, Number(name.split(".")[1] ?? NaN), this.shape.layers);
  }

  private takeTaps(names: readonly Tap[], count: number, take: (size: number, what: string) => number): TapPlace[] {
    const { hidden, intermediate, heads, kvHeads, headDim } = this.shape;
    const widths: Readonly<Record<string, number>> = {
      q: heads * headDim, q_rot: heads * headDim, head_out: heads * headDim, k: kvHeads * headDim, v: kvHeads * headDim,
      gate: intermediate, up: intermediate, act: intermediate, gated: intermediate,
    };
    return [...new Set(names)].filter((name) => !name.startsWith("k_rot.")).map((name) => {
      const kind = name.split(".")[0] ?? "", place = (TAPS_OF_A_LAYER as readonly string[]).indexOf(kind), isOuter = name === "embed" || name === "final_norm";
      if (place < 0 && !isOuter) throw bad(`there is no tap ${shown(name)}; expected embed, final_norm, k_rot.LAYER or one of ${TAPS_OF_A_LAYER.join(", ")} with a layer`);
      const width = widths[kind] ?? hidden, slot = isOuter ? name : this.layerOf(name) * TAPS_OF_A_LAYER.length + place;
      return { name, at: take(4 * count * width, `tap ${name}`), width, slot };
    });
  }

  private putTaps(places: readonly TapPlace[], take: (size: number, what: string) => number): number {
    if (places.length === 0) return 0;
    const size = this.shape.layers * TAPS_OF_A_LAYER.length, layers = take(4 * size, "taps"), at = take(layoutOf("lm_taps").size, "taps");
    const pointers = this.kernels.ints(layers, size).fill(0), values: Values = { layers };
    for (const { slot, at: place } of places) {
      if (typeof slot === "number") pointers[slot] = place;
      else values[slot] = place;
    }
    this.kernels.write("lm_taps", at, values);
    return at;
  }

  private putEdits(edits: readonly Edit[], take: (size: number, what: string) => number): number {
    if (edits.length === 0) return 0;
    const { size } = layoutOf("lm_edit"), all = take(size * edits.length, "edits"), at = take(layoutOf("lm_edits").size, "edits");
    edits.forEach((edit, i) => this.kernels.write("lm_edit", all + i * size, this.editValues(edit, take)));
    this.kernels.write("lm_edits", at, { count: edits.length, all });
    return at;
  }

  private editValues({ part, layer, head, factor = 1, add, positions }: Edit, take: (size: number, what: string) => number): Values {
    const { kernels, shape } = this, number = PARTS.indexOf(part);
    if (number < 0) throw bad(`an edit's part is ${shown(part)}; expected one of ${PARTS.join(", ")}`);
    if (!Number.isFinite(factor)) throw bad(`an edit's factor is ${shown(factor)}; expected a finite number`);
    const values: Values = { part: number, factor };
    if (part !== "embed") values["layer"] = checkIndex("an edit's layer", layer, shape.layers);
    if (part === "head") values["head"] = checkIndex("an edit's head", head, shape.heads);
    if (add != null) {
      const width = part === "head" ? shape.headDim : shape.hidden, at = take(4 * width, "edits");
      if (add.length !== width || !add.every(Number.isFinite)) throw bad(`what is added to ${part} has ${add.length} numbers; expected ${width} finite ones`);
      kernels.floats(at, width).set(add);
      values["add"] = at;
    }
    if (positions != null) {
      const at = take(4 * positions.length, "edits");
      if (positions.length === 0) throw bad("an edit has no positions; expected some, or null for all");
      kernels.ints(at, positions.length).set(positions.map((position) => checkIndex("an edit's position", position, shape.maxContext)));
      values["positions"] = at;
      values["num_positions"] = positions.length;
    }
    return values;
  }

  /** The keys of a layer as the KV cache has them, (positions, kvHeads, headDim). */
  private cachedKeys(layer: number): Float32Array {
    const { kvHeads, headDim } = this.shape, isFull = this.config.kvDtype === "float32", from = this.keys[layer] as number;
    const out = new Float32Array(this.positions * kvHeads * headDim), buffer = this.kernels.bytes.buffer;
    for (let position = 0; position < this.positions; position++) {
      for (let kv = 0; kv < kvHeads; kv++) {
        const slot = (Math.floor(position / BLOCK) * kvHeads + kv) * BLOCK + (position % BLOCK), to = (position * kvHeads + kv) * headDim;
        if (isFull) out.set(new Float32Array(buffer, from + 4 * slot * headDim, headDim), to);
        else new Uint16Array(buffer, from + 2 * slot * headDim, headDim).forEach((half, i) => (out[to + i] = fromBfloat16(half)));
      }
    }
    return out;
  }
}

function checkSampling({ temperature, topP, topK, minP, seed, step }: Required<Sampling>): void {
  const between = (name: string, value: number, least: number, most: number) => {
    if (!(value >= least && value <= most)) throw bad(`${name} is ${shown(value)}; expected a number within ${least}..${most}`);
  };
  between("temperature", temperature, 0, 3.4e38);
  between("topP", topP, 0, 1);
  between("minP", minP, 0, 1);
  checkIndex("topK", topK, 2 ** 31);
  checkIndex("step", step, 2 ** 53);
  if (typeof seed !== "bigint") checkIndex("seed", seed, 2 ** 53);
}
