/** What is added to the stream, as it is called on the page and in its numbers. */
import type { Addition } from "../schema";

type Named = Pick<Addition, "part" | "layer" | "head">;

export function nameOf({ part, layer, head }: Named): string {
  if (part === "embed") return "embedding";
  return `layer ${layer}, ${part === "head" ? `head ${head}` : part === "mlp" ? "MLP" : "attention"}`;
}

/** `head-3-2` for head 2 of layer 3, as the programs of "Open as Python" have it. */
export function idOf({ part, layer, head }: Named): string {
  return [part, layer, head].filter((one) => one !== null).join("-");
}
