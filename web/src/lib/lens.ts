/** What the lens reads, place by place. */

import type { Candidate, ChosenToken, Lens, LensLayer } from "../schema";

interface Place {
  layer: number;
  after: "attention" | "mlp";
  candidates: readonly Candidate[];
  chosen: ChosenToken | undefined;
}

/** A lens at one token: its places in the order of computation. */
export function placesOf(lens: Lens | undefined): Place[] {
  return (lens?.layers ?? []).map(({ layer, after, candidates, chosen }) => ({ layer, after, candidates: candidates[0] ?? [], chosen: chosen[0] }));
}

/** A row of a grid, whose lens has one candidate a place: the most probable token of each position, and the one that was asked about. */
export function cellsOf(layer: LensLayer): { best: Candidate; chosen: ChosenToken | undefined }[] {
  return layer.candidates.flat().map((best, i) => ({ best, chosen: layer.chosen[i] }));
}
