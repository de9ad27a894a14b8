/** A place in the picture: how deep, and at which token, layer, head, number. A link names it; a stage is one. */

/** 0 the whole, 1 a layer of all tokens, 2 a block of it for one token, 3 one product, 4 one number. */
export type Depth = 0 | 1 | 2 | 3 | 4;

export type Block = "text" | "row" | "norm" | "qkv" | "rope" | "attention" | "heads" | "mlp_norm" | "mlp" | "logits";

export type Product = "q_proj" | "k_proj" | "v_proj" | "o_proj" | "gate_proj" | "up_proj" | "down_proj" | "lm_head" | "embed_tokens";

export interface Place {
  readonly depth: Depth;
  readonly pos: number;
  readonly layer: number;
  readonly head: number;
  /** From depth 2. */
  readonly block?: Block;
  /** From depth 3. */
  readonly product?: Product;
  /** At depth 4: the row of the product. */
  readonly row?: number;
}
