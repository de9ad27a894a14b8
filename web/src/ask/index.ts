/** The views of the room Ask: why a pass predicts what it does. To add one: write its component beside this file, and a line here. */
import type { ViewEntry } from "../view";

export const asking: readonly ViewEntry[] = [
  { id: "lens-grid", title: "Logit lens", component: () => import("./LensGrid.svelte"), uses: ["layer"] },
  { id: "heads-looking", title: "Attention of all heads", component: () => import("./Looking.svelte"), uses: ["layer", "head"] },
  { id: "attribution", title: "Direct logit attribution", component: () => import("./Attribution.svelte"), uses: ["layer", "head"] },
  { id: "ablate", title: "Ablation", component: () => import("./Edits.svelte"), uses: ["layer", "head"] },
  { id: "patch", title: "Activation patching", component: () => import("./Patching.svelte"), uses: [] },
  { id: "steer", title: "Steering", component: () => import("./Steering.svelte"), uses: ["layer"] },
  { id: "probes", title: "Linear probes", component: () => import("./Probes.svelte"), uses: ["layer"] },
];
