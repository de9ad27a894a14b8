/** How control tokens are spelled, and where a text comes near to one. As `Spellings` in `tokenizer/chat/values.py`. */

const escaped = (text: string): string => text.replace(/[\\^$.*+?()[\]{}|/-]/g, "\\$&");

export class Spellings {
  readonly #all: readonly string[];
  readonly #heads = new Set<string>();
  readonly #tails = new Set<string>();
  readonly #longest: number;
  readonly #whole: RegExp;
  readonly #ends: RegExp;

  constructor(spellings: Iterable<string>) {
    this.#all = [...spellings].sort((a, b) => b.length - a.length);
    for (const text of this.#all) {
      for (let i = 1; i < text.length; i++) {
        this.#heads.add(text.slice(0, i));
        this.#tails.add(text.slice(i));
      }
    }
    this.#longest = this.#all[0]?.length ?? 0;
    const none = "(?!)";
    this.#whole = new RegExp(`(?=${this.#all.map(escaped).join("|") || none})`, "g");
    const ends = new Set(this.#all.flatMap((text) => [text.at(0) ?? "", text.at(-1) ?? ""]));
    this.#ends = ends.size ? new RegExp(`[${escaped([...ends].join(""))}]`, "g") : new RegExp(none);
  }

  /** Break every spelling inside a text, and every beginning or end of one at its edges. */
  mark(text: string, mark: string): string {
    const body = text.trim();
    if (body === "") return text;
    const [left, right] = [text.slice(0, text.length - text.trimStart().length), text.slice(text.trimEnd().length)];
    const begins = new Set([...body.matchAll(this.#whole)].map(({ index }) => index));
    for (let i = Math.max(0, body.length - this.#longest); i < body.length; i++) if (this.#heads.has(body.slice(i))) begins.add(i);
    let [broken, done] = ["", 0];
    for (const at of [...begins].sort((a, b) => a - b)) {
      broken += body.slice(done, at + 1) + mark;
      done = at + 1;
    }
    return left + (this.#mayContinue(body) ? mark : "") + broken + body.slice(done) + right;
  }

  /** Whether a control token that began before the text could go on in it. */
  #mayContinue(body: string): boolean {
    if (body.length < this.#longest && this.#all.some((spelling) => spelling.slice(1).includes(body))) return true;
    for (let i = 1; i <= Math.min(body.length, this.#longest); i++) if (this.#tails.has(body.slice(0, i))) return true;
    return false;
  }

  /** Replace the characters with which control tokens begin and end. */
  swapEnds(text: string, mark: string): string {
    return text.replace(this.#ends, mark);
  }
}
