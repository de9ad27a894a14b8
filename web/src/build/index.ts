/** The room where a learner writes a Llama: the steps, each checked inside the model. */
import type { ViewEntry } from "../view";

export const building: readonly ViewEntry[] = [
  { id: "build", title: "Build it yourself", component: () => import("./Build.svelte"), uses: [] },
];
