/** The stages in their order. To add one: write its component beside this file, and a line here. */
import type { ViewEntry } from "../view";

export const stages: readonly ViewEntry[] = [
  { id: "map", number: 0, title: "The map", component: () => import("./Map.svelte"), uses: [] },
  { id: "tokens", number: 1, title: "Text to ids", component: () => import("./Tokens.svelte"), uses: [] },
  { id: "embedding", number: 2, title: "Rows of a table", component: () => import("./Embedding.svelte"), uses: [] },
  { id: "norm", number: 3, title: "RMSNorm", component: () => import("./Norm.svelte"), uses: ["layer"] },
  { id: "qkv", number: 4, title: "Queries, keys, values", component: () => import("./Projections.svelte"), uses: ["layer", "head"] },
  { id: "rope", number: 5, title: "RoPE", component: () => import("./Rope.svelte"), uses: ["layer", "head"] },
  { id: "attention", number: 6, title: "Attention", component: () => import("./Attention.svelte"), uses: ["layer", "head"] },
  { id: "heads", number: 7, title: "Heads joined", component: () => import("./Heads.svelte"), uses: ["layer", "head"] },
  { id: "mlp", number: 8, title: "SwiGLU", component: () => import("./Mlp.svelte"), uses: ["layer"] },
  { id: "residual", number: 9, title: "The residual stream", component: () => import("./Residual.svelte"), uses: [] },
  { id: "lens", number: 10, title: "What it would say now", component: () => import("./Lens.svelte"), uses: ["layer"] },
  { id: "context", number: 11, title: "Static against contextual", component: () => import("./Contextual.svelte"), uses: ["layer"] },
  { id: "sampler", number: 12, title: "From logits to a token", component: () => import("./Sampler.svelte"), uses: [] },
  { id: "growth", number: 13, title: "The next token", component: () => import("./Growth.svelte"), uses: ["layer", "head"] },
  { id: "bits", number: 14, title: "Four bits", component: () => import("./FourBits.svelte"), uses: ["layer"] },
  { id: "learning", number: 15, title: "Learning", component: () => import("./Learning.svelte"), uses: [] },
  { id: "encoder", number: 16, title: "Encoder and decoder", component: () => import("./Encoder.svelte"), uses: [], draws: true },
];
