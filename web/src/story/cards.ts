/** The cards of the story, in the order of the computation. */
import type { Component } from "svelte";
import type { View } from "../lib/link";
import Again from "./cards/Again.svelte";
import Guess from "./cards/Guess.svelte";
import Layers from "./cards/Layers.svelte";
import Looking from "./cards/Looking.svelte";
import Mlp from "./cards/Mlp.svelte";
import Pieces from "./cards/Pieces.svelte";
import Position from "./cards/Position.svelte";
import Rows from "./cards/Rows.svelte";
import Scores from "./cards/Scores.svelte";
import Shares from "./cards/Shares.svelte";
import Stream from "./cards/Stream.svelte";
import Values from "./cards/Values.svelte";
import type { Told } from "./told.svelte";

export interface CardEntry {
  readonly id: string;
  readonly title: string;
  readonly component: Component<{ told: Told }>;
  /** The stage of Follow that has the same place. */
  readonly stage: string;
  /** The part of the model that begins with this card. */
  readonly part?: string;
}

export const CARDS: readonly CardEntry[] = [
  { id: "pieces", title: "Pieces", component: Pieces, stage: "tokens", part: "text" },
  { id: "rows", title: "A row of a table", component: Rows, stage: "embedding" },
  { id: "stream", title: "The stream", component: Stream, stage: "residual", part: "stream" },
  { id: "looking", title: "Looking back", component: Looking, stage: "qkv", part: "attention" },
  { id: "position", title: "Where it stands", component: Position, stage: "rope" },
  { id: "scores", title: "Scores", component: Scores, stage: "attention" },
  { id: "shares", title: "Shares", component: Shares, stage: "attention" },
  { id: "values", title: "Values", component: Values, stage: "heads" },
  { id: "mlp", title: "The MLP", component: Mlp, stage: "mlp", part: "MLP" },
  { id: "layers", title: "Layer after layer", component: Layers, stage: "lens", part: "layers" },
  { id: "guess", title: "The guess", component: Guess, stage: "sampler", part: "guess" },
  { id: "again", title: "And again", component: Again, stage: "growth" },
];

/** Where the same is in Follow. */
export function deeper(told: Told, { stage }: CardEntry): Pick<View, "stage" | "layer" | "head" | "pos"> {
  return { stage, layer: told.look?.layer ?? 0, head: told.look?.head ?? 0, pos: told.query };
}
