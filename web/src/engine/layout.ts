/**
 * The structs of native/llamarium.h as WebAssembly lays them out: the one place that mirrors them. tests/unit/test_wasm.py has the
 * compiler check every offset.
 */

type Scalar = "i32" | "f32" | "f64" | "u64" | "pointer";
type Field = readonly [name: string, type: Scalar | StructName];

const matrices = (...names: string[]): Field[] => names.map((name) => [name, "lm_matrix"]);
const numbers = (type: Scalar, ...names: string[]): Field[] => names.map((name) => [name, type]);

/** The fields of each struct in their order. */
export const STRUCTS = {
  lm_matrix: [...numbers("i32", "kind", "rows", "cols"), ...numbers("pointer", "data", "codebook", "bias")],
  lm_layer: [...numbers("pointer", "attention_norm", "mlp_norm"), ...matrices("q", "k", "v", "o", "gate", "up", "down")],
  lm_model: [
    ...numbers("i32", "num_layers", "hidden", "intermediate", "num_heads", "num_kv_heads", "head_dim"), ["norm_eps", "f32"],
    ["norm_dtype", "i32"], ["frequencies", "pointer"], ["attention_factor", "f32"], ...numbers("pointer", "final_norm", "layers"),
    ...matrices("table", "head"), ["num_adapters", "i32"], ["adapters", "pointer"], ...numbers("i32", "input_bits", "window"),
  ],
  lm_cache: [
    ...numbers("i32", "k_dtype", "v_dtype", "num_blocks", "block_size"), ...numbers("pointer", "k", "v", "k_scales", "v_scales"),
  ],
  lm_edit: [
    ...numbers("i32", "part", "layer", "head"), ["factor", "f32"], ["add", "pointer"], ["num_positions", "i32"],
    ["positions", "pointer"],
  ],
  lm_edits: [["count", "i32"], ["all", "pointer"]],
  lm_batch: [
    ...numbers("i32", "num_tokens", "num_sequences", "table_stride", "num_logits"),
    ...numbers("pointer", "token_ids", "positions", "sequences", "block_tables", "logit_rows", "adapters", "edits"),
  ],
  lm_taps: numbers("pointer", "embed", "final_norm", "layers"),
  lm_choice: [
    ...numbers("f32", "temperature", "min_p"), ["top_k", "i32"], ["top_p", "f64"], ...numbers("u64", "seed", "step"),
    ["mask", "pointer"],
  ],
} as const satisfies Record<string, readonly Field[]>;

export type StructName =
  | "lm_matrix" | "lm_layer" | "lm_model" | "lm_cache" | "lm_edit" | "lm_edits" | "lm_batch" | "lm_taps" | "lm_choice";

/** The values of a struct; what is left out is 0. */
export interface Values {
  [field: string]: number | bigint | Values;
}

export interface Layout {
  size: number;
  align: number;
  fields: readonly { name: string; type: Scalar | StructName; offset: number }[];
}

const SIZES: Record<Scalar, number> = { i32: 4, f32: 4, f64: 8, u64: 8, pointer: 4 };
const layouts = new Map<StructName, Layout>();

/** Where the fields of a struct lie: each at the next multiple of its own size. */
export function layoutOf(name: StructName): Layout {
  const kept = layouts.get(name);
  if (kept !== undefined) return kept;
  let offset = 0, most = 1;
  const fields = (STRUCTS[name] as readonly Field[]).map(([field, type]) => {
    const { size, align } = type in STRUCTS ? layoutOf(type as StructName) : { size: SIZES[type as Scalar], align: SIZES[type as Scalar] };
    const at = Math.ceil(offset / align) * align;
    offset = at + size;
    most = Math.max(most, align);
    return { name: field, type, offset: at };
  });
  const layout = { size: Math.ceil(offset / most) * most, align: most, fields };
  layouts.set(name, layout);
  return layout;
}

/** Write a struct to memory. */
export function writeStruct(view: DataView, name: StructName, at: number, values: Values): void {
  for (const { name: field, type, offset } of layoutOf(name).fields) {
    const value = values[field] ?? 0, place = at + offset;
    if (type in STRUCTS) writeStruct(view, type as StructName, place, typeof value === "object" ? value : {});
    else if (type === "u64") view.setBigUint64(place, BigInt.asUintN(64, BigInt(value as number | bigint)), true);
    else if (type === "f64") view.setFloat64(place, Number(value), true);
    else if (type === "f32") view.setFloat32(place, Number(value), true);
    else if (type === "i32") view.setInt32(place, Number(value), true);
    else view.setUint32(place, Number(value), true);
  }
}

/** LM_TAP_...: their order. */
export const TAPS_OF_A_LAYER = [
  "attn_norm", "q", "k", "v", "q_rot", "head_out", "attn_out", "resid_mid", "mlp_norm", "gate", "up", "act", "gated", "mlp_out", "resid",
] as const;

/** LM_EDIT_...: their order. */
export const PARTS = ["embed", "attention", "head", "mlp", "residual"] as const;

/** LM_FLOAT32 and so on. */
export const DTYPES = { float32: 0, bfloat16: 1 } as const;

/** A type of weights: GGUF's number, LM_..., and its blocks. */
export interface Kind {
  name: string;
  ggml: number;
  kind: number;
  /** Weights of a block; 1: floats as the file has them. */
  block: number;
  bytes: number;
}

const kind = (name: string, ggml: number, number: number, block: number, bytes: number): Kind => ({ name, ggml, kind: number, block, bytes });

/** What the kernels multiply, as native/tiles.h has it. */
export const KINDS: readonly Kind[] = [
  kind("F32", 0, 8, 1, 4), kind("F16", 1, 10, 1, 2), kind("BF16", 30, 0, 1, 2), kind("Q8_0", 8, 1, 32, 34), kind("Q4_0", 2, 2, 32, 18),
  kind("Q4_1", 3, 3, 32, 20), kind("IQ4_NL", 20, 4, 32, 18), kind("Q5_0", 6, 9, 32, 22), kind("Q4_K", 12, 5, 256, 144),
  kind("Q5_K", 13, 6, 256, 176), kind("Q6_K", 14, 7, 256, 210), kind("IQ4_XS", 23, 11, 256, 136),
];

/** Types of GGUF that are not multiplied here, for messages and sizes. */
export const OTHER_KINDS: Readonly<Record<number, string>> = {
  7: "Q5_1", 10: "Q2_K", 11: "Q3_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S", 29: "IQ1_M",
  34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
};

/** What the 16 codes of IQ4_NL and IQ4_XS stand for, plus 128. */
export const CODEBOOK = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113].map((value) => value + 128);

/** `LM_INTERFACE` of the header that this was written for. */
export const INTERFACE = 27;

/** Rows of a tile. */
export const PANEL_ROWS = 16;
