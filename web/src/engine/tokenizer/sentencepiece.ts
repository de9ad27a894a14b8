/** A SentencePiece vocabulary inside a GGUF file ("llama"), with the ids of llama.cpp. As tokenizer/backends/gguf_sentencepiece.py. */
import { utf8 } from "./bytes.ts";
import { Heap } from "./heap.ts";

const SPACE = "\u2581";
const UNKNOWN = 2, CONTROL = 3, USER_DEFINED = 4, BYTE = 6;
const PLACES = 2 ** 31; // more than a text has characters

export interface Pieces {
  pieces: readonly string[];
  types: readonly number[];
  scores: readonly number[];
  /** Ids of control tokens, which no text becomes. */
  control: ReadonlySet<number>;
  hasPrefix: boolean;
}

export class SentencePiece {
  private readonly ids = new Map<string, number>(); // of pieces that a text can become
  private readonly ranks: readonly number[]; // of each piece's score, 0 the highest
  private readonly bytes: readonly number[]; // of each byte, or none
  private readonly unknown: number | undefined;
  private readonly added: readonly (readonly [text: string, id: number])[]; // cut out of texts first, the longest first

  constructor(private readonly given: Pieces) {
    const { pieces, types, scores, control } = given;
    const kindOf = (id: number) => (types[id] !== UNKNOWN && control.has(id) ? CONTROL : types[id]);
    pieces.forEach((piece, id) => {
      if (![UNKNOWN, CONTROL, BYTE].includes(kindOf(id) ?? 1)) this.ids.set(piece, id);
    });
    const sorted = [...new Set(scores.map((score) => (Object.is(score, -0) ? "-0" : String(score))))].sort(descending);
    const places = new Map(sorted.map((score, place) => [score, place]));
    this.ranks = scores.map((score) => places.get(Object.is(score, -0) ? "-0" : String(score)) as number);
    const spelled = new Map(pieces.flatMap((piece, id): [string, number][] => (kindOf(id) === BYTE ? [[piece, id]] : [])));
    const bytes = Array.from({ length: 256 }, (_, byte) => spelled.get(`<0x${byte.toString(16).toUpperCase().padStart(2, "0")}>`));
    this.bytes = bytes.includes(undefined) ? [] : (bytes as number[]);
    const unknown = types.indexOf(UNKNOWN);
    this.unknown = unknown < 0 ? undefined : unknown;
    const defined = pieces.flatMap((piece, id): [string, number][] => (types[id] === USER_DEFINED && !control.has(id) ? [[piece, id]] : []));
    this.added = defined.sort(([a], [b]) => utf8(b).length - utf8(a).length);
  }

  /** The ids of a text; each part of it between added tokens begins with a space, if the vocabulary has it so. */
  encode(text: string): number[] {
    let parts: (string | number)[] = [text];
    for (const [content, id] of this.added) {
      if (text.includes(content)) parts = parts.flatMap((part) => (typeof part === "number" ? [part] : cutOut(part, content, id)));
    }
    return parts.flatMap((part) => (typeof part === "number" ? [part] : this.plain(part)));
  }

  private plain(text: string): number[] {
    if (text === "") return [];
    const at = Array.from((this.given.hasPrefix ? SPACE : "") + text.replaceAll(" ", SPACE));
    const after = at.map((_, i) => i + 1), before = at.map((_, i) => i - 1), heap = new Heap();
    const rankAt = (left: number) => {
      const right = after[left] as number, id = right < at.length ? this.ids.get((at[left] as string) + (at[right] as string)) : undefined;
      return id === undefined ? undefined : this.ranks[id];
    };
    const offer = (left: number) => {
      const rank = left >= 0 ? rankAt(left) : undefined;
      if (rank !== undefined) heap.push(rank * PLACES + left);
    };
    for (let i = 0; i < at.length; i++) offer(i);
    while (heap.size > 0) {
      const best = heap.pop(), left = best % PLACES;
      if (at[left] === "" || rankAt(left) !== (best - left) / PLACES) continue; // one of the two has been joined with another
      const right = after[left] as number, next = after[right] as number;
      at[left] = (at[left] as string) + (at[right] as string);
      at[right] = "";
      after[left] = next;
      if (next < at.length) before[next] = left;
      offer(before[left] as number);
      offer(left);
    }
    return this.idsOf(at.filter((piece) => piece !== ""));
  }

  /** What no piece covers is bytes, or the unknown piece, once for several characters in a row. */
  private idsOf(pieces: readonly string[]): number[] {
    let wasUnknown = false;
    return pieces.flatMap((piece) => {
      const id = this.ids.get(piece), isFirst = !wasUnknown;
      wasUnknown = id === undefined;
      if (id !== undefined) return [id];
      if (this.bytes.length) return Array.from(utf8(piece), (byte) => this.bytes[byte] as number);
      return isFirst && this.unknown !== undefined ? [this.unknown] : [];
    });
  }

  bytesOf(id: number): Uint8Array {
    const { pieces, types, control } = this.given, piece = pieces[id] ?? "";
    if (types[id] === BYTE && !control.has(id) && this.bytes.includes(id)) return Uint8Array.of(this.bytes.indexOf(id));
    return utf8(types[id] === UNKNOWN || types[id] === CONTROL || types[id] === USER_DEFINED || control.has(id) ? piece : piece.replaceAll(SPACE, " "));
  }
}

/** Higher scores first; -0 below 0. */
function descending(a: string, b: string): number {
  return Number(b) - Number(a) || (a === "-0" ? 1 : 0) - (b === "-0" ? 1 : 0);
}

function cutOut(text: string, content: string, id: number): (string | number)[] {
  return text.split(content).flatMap((part, i) => [...(i ? [id] : []), ...(part ? [part] : [])]);
}
