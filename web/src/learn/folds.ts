/** What of a chapter stands open and what folds: Python does, and with it what it prints where a figure shows that in its place. */

import type { Part } from "../../plugins/markdown";

type Code = Extract<Part, { kind: "code" }>;

export type Piece = Part | { kind: "fold"; of: readonly Code[] };

export function pieces(parts: readonly Part[]): Piece[] {
  const found: Piece[] = [];
  for (let i = 0; i < parts.length; i++) {
    const [before, part, next] = [parts[i - 1], parts[i] as Part, parts[i + 1]];
    if (part.kind !== "code" || part.language !== "python") {
      found.push(part);
      continue;
    }
    const isShown = before?.kind === "figure" && next?.kind === "code" && next.language === "output";
    found.push({ kind: "fold", of: isShown ? [part, next] : [part] });
    if (isShown) i++;
  }
  return found;
}
