/** The pre-tokenizers that GGUF files name: cutters.json, which tools/make_cutters.py makes of the table in Python. */
import table from "./cutters.json";

export interface Cutter {
  /** Each cuts the pieces of the one before. */
  patterns: RegExp[];
  /** A piece that is a token becomes it without merging. */
  wholePieces: boolean;
  addBos: boolean;
}

const SPACES = "\\t-\\r \\u0085\\u00a0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000"; // JavaScript's \s has others
const CASES: Readonly<Record<string, string>> = { s: "sSſ", k: "kKK" };

/** One of Oniguruma's expressions as JavaScript reads it. */
function translated(pattern: string): RegExp {
  let out = "", isClass = false;
  const plain = pattern.replace(/\(\?i:([^)]*)\)/g, (_, body: string) => `(?:${body.replace(/[a-z]/g, (x) => `[${CASES[x] ?? x + x.toUpperCase()}]`)})`);
  for (const [token] of plain.matchAll(/\\x\{[0-9a-fA-F]+\}|\\.|[\s\S]/gu)) {
    if (token === "[") isClass = true;
    if (token === "]") isClass = false;
    out += token.startsWith("\\x{") ? `\\u{${token.slice(3)}` : token === "\\s" ? (isClass ? SPACES : `[${SPACES}]`) : token === "\\S" ? `[^${SPACES}]` : token;
  }
  return new RegExp(out, "gu");
}

/** Find the pre-tokenizer of a name; undefined: not known; null: known, and not read here. */
export function findCutter(name: string): Cutter | null | undefined {
  const found = table.cutters.find(({ names }) => names.includes(name));
  if (found === undefined) return table.others.includes(name) ? null : undefined;
  return { patterns: found.patterns.map(translated), wholePieces: found.whole_pieces, addBos: found.add_bos };
}

/** The pieces of a text, which joined are the text. */
export function cut(text: string, patterns: readonly RegExp[]): string[] {
  return patterns.reduce<string[]>((pieces, pattern) => pieces.flatMap((piece) => isolated(piece, pattern)), [text]);
}

/** What a pattern matches, and what lies between. */
function isolated(text: string, pattern: RegExp): string[] {
  const pieces: string[] = [];
  let end = 0;
  for (const { 0: match, index } of text.matchAll(pattern)) {
    if (index > end) pieces.push(text.slice(end, index));
    if (match) pieces.push(match);
    end = index + match.length;
  }
  if (end < text.length) pieces.push(text.slice(end));
  return pieces;
}
