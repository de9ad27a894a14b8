/** A vocabulary of words: a token is a word or a number with the space before it, a punctuation mark, or a line's end. As tokenizer/backends/words.py. */
import { EngineError, shown } from "../errors.ts";
import { utf8 } from "./bytes.ts";

export const UNKNOWN = "<|unknown|>";

const SPACES = "\\t-\\r \\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000"; // Unicode's, which `\\s` is not
const WORD = "[\\p{L}\\p{M}]+(?:['\u2019][\\p{L}\\p{M}]+)*";
const PIECE = new RegExp(` ?${WORD}| ?\\p{N}+| ?[^${SPACES}\\p{L}\\p{M}\\p{N}]|[${SPACES}]`, "gu");

export class Words {
  private readonly ids: ReadonlyMap<string, number>;

  /** The tokens by their ids; the first is `UNKNOWN`, which no text becomes. */
  constructor(private readonly texts: readonly string[]) {
    this.ids = new Map(texts.map((text, id) => [text, id]));
  }

  encode(text: string): number[] {
    return [...(text && ` ${text}`).matchAll(PIECE)].map(([piece]) => {
      const id = this.ids.get(piece);
      if (id !== undefined) return id;
      throw new EngineError("input", `the word "${shown(piece)}" is not among the ${this.texts.length} that this model knows; use another`);
    });
  }

  bytesOf(id: number): Uint8Array {
    return utf8(this.texts[id] ?? "");
  }
}
