/** What a room lists of each of its views. */
import type { Component } from "svelte";

export interface ViewEntry {
  /** What a link calls it; of all rooms' views only this one has it. */
  id: string;
  /** Its place in the course, for a stage; places may be free. */
  number?: number;
  title: string;
  /** What the strip of a narrow or full room calls it. */
  short?: string;
  /** Loads it: a view comes when it is opened. */
  component: () => Promise<{ default: Component }>;
  /** It draws a figure of its own: in the place of the picture, or among all else. */
  draws?: "beside" | "within";
  /** Which selectors stand above it. */
  uses: readonly ("layer" | "head")[];
}
