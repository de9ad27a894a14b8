/** The Linears of a layer, and the types that they can become. */

export const LINEARS = ["up_proj", "gate_proj", "down_proj", "q_proj", "k_proj", "v_proj", "o_proj"] as const;
export const TYPES = ["NF4", "Q4_1", "Q8_0"] as const;

export type LinearName = (typeof LINEARS)[number];
export type TypeName = (typeof TYPES)[number];

/** Where a Linear stands in the model. */
export function pathOf(layer: number, linear: LinearName): string {
  const part = ["q_proj", "k_proj", "v_proj", "o_proj"].includes(linear) ? "self_attn" : "mlp";
  return `model.layers.${layer}.${part}.${linear}`;
}
