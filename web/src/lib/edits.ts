/** Edits of the model as a link names them: `head:3:2:0:1,5;mlp:7::-1:` is part, layer, head, factor, positions. */

import type { EditFields } from "../schema";
import { literal, named } from "./python";

export const PARTS = ["head", "attention", "mlp", "residual", "embed"] as const;
export type Part = (typeof PARTS)[number];

/** One edit; what a part does not have is null. */
export interface Edit {
  part: Part;
  layer: number | null;
  head: number | null;
  factor: number;
  /** At which tokens; null is all. */
  positions: readonly number[] | null;
}

const ONE = /^(head|attention|mlp|residual|embed):(\d{0,4}):(\d{0,4}):(-?\d{1,4}(?:\.\d{1,4})?):((?:\d{1,6}(?:,\d{1,6})*)?)$/;

export function writeEdits(edits: readonly Edit[]): string {
  return edits
    .map(({ part, layer, head, factor, positions }) => [part, layer ?? "", head ?? "", factor, positions?.join() ?? ""].join(":"))
    .join(";");
}

/** Read what a link names; what it names badly is left out. */
export function readEdits(text: string): Edit[] {
  return text.split(";").flatMap((one) => {
    const [, part, layer, head, factor, positions] = ONE.exec(one) ?? [];
    if (part === undefined) return [];
    const whole = (digits: string | undefined): number | null => (digits ? Number(digits) : null);
    const read: Edit = {
      part: part as Part, layer: whole(layer), head: whole(head), factor: Number(factor),
      positions: positions ? positions.split(",").map(Number) : null,
    };
    return (read.layer === null) === (part === "embed") && (read.head === null) === (part !== "head") ? [read] : [];
  });
}

const WHAT: Record<Part, string> = {
  head: "head", attention: "attention", mlp: "the MLP", residual: "the stream", embed: "the embedding",
};

/** What an edit does, in words. */
export function said({ part, layer, head, factor, positions }: Edit): string {
  const where = part === "embed" ? "" : part === "residual" ? ` after layer ${layer}` : ` of layer ${layer}`;
  const what = `${WHAT[part]}${head === null ? "" : ` ${head}`}${where}`;
  const at = positions === null ? "at all tokens" : `at token${positions.length > 1 ? "s" : ""} ${positions.join(", ")}`;
  return `${what} ${factor === 0 ? "taken away" : `times ${String(factor).replace("-", "−")}`} ${at}`;
}

export function asFields(edits: readonly Edit[]): EditFields[] {
  return edits.map(({ positions, ...rest }) => ({ ...rest, positions: positions === null ? null : ([...positions] as [number, ...number[]]) }));
}

/** A line of Python that makes the edit. */
export function asPython({ part, factor, ...where }: Edit): string {
  return `scale(${literal(part)}, ${literal(factor)}, ${named(where)})`.replace(", )", ")");
}

/** Edits as a request has them: heads and MLPs that are taken away at all tokens; undefined where one does anything else. */
export function asInside(edits: readonly Edit[]): { ablate: { heads: string[]; mlps: number[] } } | undefined {
  const heads = edits.filter(({ part }) => part === "head").map(({ layer, head }) => `${layer}.${head}`);
  const mlps = edits.filter(({ part }) => part === "mlp").map(({ layer }) => layer ?? 0);
  const fits = edits.length && heads.length + mlps.length === edits.length && edits.every(({ factor, positions }) => factor === 0 && positions === null);
  return fits ? { ablate: { heads, mlps } } : undefined;
}
