/** Bytes merge into a token: the piece of the text that it is of, merge by merge, and the number that it has. */

import { count, counted, visible } from "../../lib/format";
import type { MergeView } from "../../schema";
import type { Data } from "../data/data";
import type { Leaf } from "../depths/leaf";
import type { TextNumbers } from "../data/near";

const MOST = 24; // bytes of a piece that are drawn
const LINES = { wide: 6, narrow: 6 };

interface Joined {
  readonly start: number;
  readonly size: number;
  readonly text: string;
  readonly isFresh: boolean;
}

const byteText = (byte: number): string => (byte > 32 && byte < 127 ? String.fromCharCode(byte) : byte === 32 ? "␣" : byte.toString(16).padStart(2, "0"));

/** The parts of a piece after so many merges. */
export function partsAfter(bytes: readonly number[], merges: readonly MergeView[], done: number): Joined[] {
  const at = new Map<number, Joined>(bytes.map((byte, start) => [start, { start, size: 1, text: byteText(byte), isFresh: false }]));
  merges.slice(0, done).forEach((merge, i) => {
    at.delete(merge.start + merge.left.bytes.length);
    at.set(merge.start, { start: merge.start, size: merge.result.bytes.length, text: visible(merge.result.text), isFresh: i === done - 1 });
  });
  return [...at.values()].sort((a, b) => a.start - b.start);
}

export function text(leaf: Leaf, { piece, bytes, id, pos, text: own }: TextNumbers, data: Data): void {
  const merges = piece?.merges ?? [];
  const lines = Math.min(merges.length, leaf.isNarrow ? LINES.narrow : LINES.wide);
  const steps = Array.from({ length: lines + 1 }, (_, i) => (i === 0 ? 0 : merges.length - lines + i));
  const shown = bytes.slice(0, MOST);
  const [left, right] = [leaf.isNarrow ? 0 : 0.2, leaf.isNarrow ? 1 : 0.86];
  const wide = (right - left) / Math.max(shown.length, 4);
  const high = 0.72 / (lines + 1);
  const height = Math.min(0.7 * high, leaf.down(44));
  for (const [i, done] of steps.entries()) {
    const v = 0.04 + i * high;
    const alpha = leaf.done((0.7 * i) / (lines + 1), (0.7 * (i + 1)) / (lines + 1));
    const merge = merges[done - 1];
    if (!leaf.isNarrow) leaf.text(`s${i}`, [0, v + height / 2], done === 0 ? counted(bytes.length, "byte") : `merge ${done} of ${merges.length}`, { size: "normal", alpha, most: 0.19 * leaf.size.width });
    if (merge && !leaf.isNarrow) leaf.text(`s${i}.rank`, [1, v + height / 2], `rank ${count(merge.rank)}`, { align: "right", mono: true, alpha, most: 0.13 * leaf.size.width });
    for (const part of partsAfter(bytes, merges, done)) {
      if (part.start >= MOST) continue;
      const box = { u0: left + (part.start + 0.05) * wide, u1: left + Math.min(MOST, part.start + part.size - 0.05) * wide, v0: v, v1: v + height };
      const says = part.isFresh && merge ? { name: `merge ${done}: “${merge.left.text}” and “${merge.right.text}” are “${merge.result.text}”, learned as number`, value: merge.rank, unit: "rank" } : { name: done === 0 ? `byte ${part.start}` : `part “${part.text}”`, value: done === 0 ? (bytes[part.start] ?? 0) : part.size, unit: done === 0 ? "value" : "bytes" };
      leaf.box(`s${i}.p${part.start}`, box, part.isFresh ? "says" : "line", { outlined: !part.isFresh, corner: 4, alpha, says });
      leaf.text(`s${i}.p${part.start}.name`, [(box.u0 + box.u1) / 2, v + height / 2], part.text, { align: "center", mono: true, size: "normal", ink: part.isFresh ? "panel" : "ink", alpha, most: part.size * wide * leaf.size.width - 4 });
    }
  }
  const ids = piece && piece.ids.length > 1 ? `, one of the ${piece.ids.length} tokens of “${visible(piece.text)}”` : "";
  leaf.text("token", [0.5, 0.93], `${visible(own)}  →  id ${id}`, { size: "title", align: "center", ink: "ink", most: leaf.size.width, alpha: leaf.done(0.7, 1), says: { name: `token ${pos}, “${own}”${ids}`, value: id, unit: "id" }, enter: { depth: 2, block: "row", pos, layer: 0, head: data.chosen.head } });
  leaf.text("piece", [0.5, 0.85], piece ? `token ${pos}${ids}` : "the text that it is of is not known: the tokens were given by their ids, or it is a control token", { align: "center", size: "small", most: leaf.size.width, alpha: leaf.done(0.7, 1) });
}
