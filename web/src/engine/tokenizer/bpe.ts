/** Byte-pair encoding: of neighbours that have a merge, those of the lowest rank are joined first, of equals the leftmost. */
import { EngineError } from "../errors.ts";
import { CHARACTERS, utf8 } from "./bytes.ts";
import { cut, type Cutter } from "./cutters.ts";
import { Heap } from "./heap.ts";

const SHIFT = 2 ** 21; // more than a vocabulary has tokens
const PLACES = 2 ** 31; // more than a piece has bytes
const KEPT = 20_000, LONGEST_KEPT = 64;

export class ByteLevelBPE {
  private readonly merges = new Map<number, number>(); // two neighbours to their rank
  private readonly made: number[] = []; // of each rank, the token that they become
  private readonly ofBytes: (number | undefined)[];
  private readonly known = new Map<string, readonly number[]>();

  /** `merges`: "left right", the first learned first. */
  constructor(private readonly ids: ReadonlyMap<string, number>, merges: readonly string[], private readonly cutter: Cutter, source: string) {
    merges.forEach((merge, rank) => {
      const [left = "", right = "", ...rest] = merge.split(" "), a = ids.get(left), b = ids.get(right), made = ids.get(left + right);
      if (!left || !right || rest.length || a === undefined || b === undefined || made === undefined) {
        throw new EngineError("damaged", `${source}: tokenizer.ggml.merges[${rank}] joins what are no tokens; the file is damaged`);
      }
      this.made.push(made);
      if (!this.merges.has(a * SHIFT + b)) this.merges.set(a * SHIFT + b, rank);
    });
    this.ofBytes = CHARACTERS.map((character) => ids.get(character));
  }

  encode(text: string): number[] {
    return cut(text, this.cutter.patterns).flatMap((piece) => this.piece(piece));
  }

  private piece(text: string): readonly number[] {
    const kept = this.known.get(text);
    if (kept !== undefined) return kept;
    const bytes = utf8(text);
    const whole = this.cutter.wholePieces ? this.ids.get(Array.from(bytes, (byte) => CHARACTERS[byte]).join("")) : undefined;
    const ids = whole === undefined ? this.merged(bytes) : [whole];
    if (text.length <= LONGEST_KEPT && this.known.size < KEPT) this.known.set(text, ids);
    return ids;
  }

  private merged(bytes: Uint8Array): number[] {
    const count = bytes.length, ids = Array.from(bytes, (byte) => {
      const id = this.ofBytes[byte];
      if (id === undefined) throw new EngineError("input", `the vocabulary has no token for the byte ${byte}; leave out the character that it is part of`);
      return id;
    });
    const after = Array.from({ length: count }, (_, i) => i + 1), before = Array.from({ length: count }, (_, i) => i - 1);
    const rankAt = (at: number) => {
      const next = after[at] as number;
      return next < count ? this.merges.get((ids[at] as number) * SHIFT + (ids[next] as number)) : undefined;
    };
    const heap = new Heap();
    const offer = (at: number) => {
      const rank = at >= 0 ? rankAt(at) : undefined;
      if (rank !== undefined) heap.push(rank * PLACES + at);
    };
    for (let at = 0; at < count; at++) offer(at);
    while (heap.size > 0) {
      const best = heap.pop(), at = best % PLACES, rank = (best - at) / PLACES;
      if (ids[at] === -1 || rankAt(at) !== rank) continue; // one of the two has been merged with another
      const gone = after[at] as number, next = after[gone] as number;
      ids[at] = this.made[rank] as number;
      ids[gone] = -1;
      after[at] = next;
      if (next < count) before[next] = at;
      offer(before[at] as number);
      offer(at);
    }
    return ids.filter((id) => id !== -1);
  }
}
