/** The stages in their order. To add one: write its component beside this file, and a line here. */
import type { ViewEntry } from "../view";

export const stages: readonly ViewEntry[] = [
  { id: "map", number: 0, short: "map", title: "The map", component: () => import("./Map.svelte"), uses: [] },
  { id: "tokens", number: 1, short: "text", title: "Text to ids", component: () => import("./Tokens.svelte"), uses: [] },
  { id: "embedding", number: 2, short: "rows", title: "Rows of a table", component: () => import("./Embedding.svelte"), uses: [] },
  { id: "norm", number: 3, short: "norm", title: "RMSNorm", component: () => import("./Norm.svelte"), uses: ["layer"] },
  { id: "qkv", number: 4, short: "q k v", title: "Queries, keys, values", component: () => import("./Projections.svelte"), uses: ["layer", "head"] },
  { id: "rope", number: 5, short: "RoPE", title: "RoPE", component: () => import("./Rope.svelte"), uses: ["layer", "head"] },
  { id: "attention", number: 6, short: "attention", title: "Attention", component: () => import("./Attention.svelte"), uses: ["layer", "head"] },
  { id: "heads", number: 7, short: "heads", title: "Heads joined", component: () => import("./Heads.svelte"), uses: ["layer", "head"] },
  { id: "mlp", number: 8, short: "SwiGLU", title: "SwiGLU", component: () => import("./Mlp.svelte"), uses: ["layer"] },
  { id: "residual", number: 9, short: "stream", title: "The residual stream", component: () => import("./Residual.svelte"), uses: ["layer"] },
  { id: "lens", number: 10, short: "lens", title: "What it would say now", component: () => import("./Lens.svelte"), uses: ["layer"] },
  { id: "context", number: 11, short: "context", title: "Static against contextual", component: () => import("./Contextual.svelte"), uses: ["layer"], draws: "beside" },
  { id: "sampler", number: 12, short: "sampling", title: "From logits to a token", component: () => import("./Sampler.svelte"), uses: [] },
  { id: "growth", number: 13, short: "next token", title: "The next token", component: () => import("./Growth.svelte"), uses: ["layer", "head"], draws: "beside" },
  { id: "bits", number: 14, short: "4 bits", title: "Four bits", component: () => import("./FourBits.svelte"), uses: ["layer"] },
  { id: "learning", number: 15, short: "learning", title: "Learning", component: () => import("./Learning.svelte"), uses: [], draws: "beside" },
  { id: "encoder", number: 16, short: "encoder", title: "Encoder and decoder", component: () => import("./Encoder.svelte"), uses: [], draws: "within" },
];
