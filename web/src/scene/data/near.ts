/** What the depths below the whole are drawn from: exact numbers of one layer, of one block of a token, of one product. */

import type { CandidateView, CodesView, Neuron, PieceView, SamplerSteps } from "../../schema";
import type { Block, Product } from "../places/place";

/** Depth 1: a layer, at some tokens (T of them). Lengths are Euclidean. */
export interface LayerNumbers {
  readonly layer: number;
  /** The first of the tokens. */
  readonly start: number;
  readonly count: number;
  /** Length of the stream, by token: before the layer, between its halves, after it. */
  readonly before: Float64Array;
  readonly middle: Float64Array;
  readonly after: Float64Array;
  /** Root mean square of the stream, with epsilon, which the two norms divide by. */
  readonly rms: Float64Array;
  readonly middleRms: Float64Array;
  /** Length of what is added. */
  readonly attention: Float64Array;
  readonly mlp: Float64Array;
  /** Length of each head's query, (T, N), and of each group's key and value, (T, K). */
  readonly queries: Float32Array;
  readonly keys: Float32Array;
  readonly values: Float32Array;
  /** Shares, (N, T, S): over all S tokens of the pass. */
  readonly pattern: Float32Array;
  readonly sources: number;
  /** Angle of RoPE's first pair for each position that a token is after another. */
  readonly frequency: number;
}

interface At {
  readonly pos: number;
  readonly layer: number;
}

export interface NormNumbers extends At {
  readonly block: "norm" | "mlp_norm";
  readonly before: Float32Array;
  readonly gamma: Float32Array;
  readonly after: Float32Array;
  readonly eps: number;
}

export interface QkvNumbers extends At {
  readonly block: "qkv";
  readonly input: Float32Array;
  /** (N, H) and twice (K, H). */
  readonly q: Float32Array;
  readonly k: Float32Array;
  readonly v: Float32Array;
}

export interface RopeNumbers extends At {
  readonly block: "rope";
  readonly head: number;
  /** Of each pair, in radians a position. */
  readonly frequencies: readonly number[];
  /** (H,): of the head, and of its group's key; before, and as the pass turned them. */
  readonly q: Float32Array;
  readonly qTurned: Float32Array;
  readonly k: Float32Array;
  readonly kTurned: Float32Array;
}

export interface AttentionNumbers extends At {
  readonly block: "attention";
  readonly head: number;
  /** (S,): a score of a later token is -Infinity. */
  readonly scores: Float32Array;
  readonly pattern: Float32Array;
  /** (S, H): of the head's group. */
  readonly values: Float32Array;
  /** (H,): what the head has gathered. */
  readonly out: Float32Array;
}

export interface HeadsNumbers extends At {
  readonly block: "heads";
  /** (N, H): what the heads have gathered, side by side. */
  readonly gathered: Float32Array;
  /** (N, D): what each head adds. */
  readonly added: Float32Array;
  readonly norms: readonly number[];
  readonly shares: readonly number[];
  readonly out: Float32Array;
  readonly rounding: number;
}

export interface MlpNumbers extends At {
  readonly block: "mlp";
  readonly input: Float32Array;
  readonly gate: Float32Array;
  readonly act: Float32Array;
  readonly up: Float32Array;
  readonly gated: Float32Array;
  readonly out: Float32Array;
  /** The strongest, the strongest first. */
  readonly neurons: readonly Neuron[];
}

export interface TextNumbers extends At {
  readonly block: "text";
  readonly id: number;
  readonly text: string;
  /** The piece of the text that the token is of, and its bytes; none where the pass is named by ids, or the token is special. */
  readonly piece?: Pick<PieceView, "text" | "ids" | "merges"> | undefined;
  readonly bytes: readonly number[];
}

export interface RowNumbers extends At {
  readonly block: "row";
  readonly id: number;
  readonly text: string;
  readonly row: Float32Array;
}

export interface LogitsNumbers extends At {
  readonly block: "logits";
  readonly input: Float32Array;
  readonly candidates: readonly CandidateView[];
  readonly sampled?: SamplerSteps | undefined;
  readonly temperature: number;
}

export type BlockNumbers =
  | NormNumbers | QkvNumbers | RopeNumbers | AttentionNumbers | HeadsNumbers | MlpNumbers | TextNumbers | RowNumbers | LogitsNumbers;

/** Depth 3: some rows of a matrix, and the vector that they are multiplied with. */
export interface ProductNumbers extends At {
  readonly product: Product;
  readonly head: number;
  /** The row that is looked at. */
  readonly row: number;
  /** The first of the rows that are here. */
  readonly first: number;
  /** (rows, columns) */
  readonly weights: Float32Array;
  readonly columns: number;
  /** How many rows the matrix has. */
  readonly of: number;
  /** (columns,); none for the table, of which a row is taken. */
  readonly input?: Float32Array | undefined;
  /** (rows,): what the pass got of them. */
  readonly output: Float32Array;
  /** Where the matrix is packed: the codes of the row from `codes.start`. */
  readonly codes?: CodesView | undefined;
  /** What the weights are stored as; they are here as what that means. */
  readonly type?: string | undefined;
  /** Whether the pass rounded the inputs before it multiplied. */
  readonly isRounded: boolean;
}

/** What has come so far; of a place that has been left there may still be some. */
export interface Near {
  readonly layer?: LayerNumbers | undefined;
  readonly block?: BlockNumbers | undefined;
  readonly product?: ProductNumbers | undefined;
}

/** Which numbers of a pass a block is drawn from belong to a place. */
export const isOf = (numbers: At & { readonly block: Block } | undefined, pos: number, layer: number, block: Block): boolean =>
  numbers?.block === block && numbers.pos === pos && (numbers.layer === layer || ["text", "row", "logits"].includes(block));
