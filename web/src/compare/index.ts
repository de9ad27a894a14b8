/** The views of two models over one text, and of training runs. To add one: write its component beside this file, and a line here. */
import type { ViewEntry } from "../view";

export const comparisons: readonly ViewEntry[] = [
  { id: "bits-cost", title: "What bits cost", component: () => import("./Bits.svelte"), uses: [] },
  { id: "compare", title: "Two models", component: () => import("./TwoModels.svelte"), uses: [] },
  { id: "runs", title: "Training runs", component: () => import("./Runs.svelte"), uses: [] },
  { id: "checkpoints", title: "Checkpoints", component: () => import("./Checkpoints.svelte"), uses: [] },
];
