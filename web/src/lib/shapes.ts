/** The model at hand, and the published shapes that can be shown beside it. */
export const SHAPES = ["", "llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b"] as const;

export const SHAPE_NAMES: Record<(typeof SHAPES)[number], string> = {
  "": "this model", "llama-3.2-1b": "Llama 3.2 1B", "llama-3.2-3b": "Llama 3.2 3B", "llama-3.1-8b": "Llama 3.1 8B",
};
