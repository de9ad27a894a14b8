import type { ErrorCode } from "./types.ts";

/** What is wrong, where, and what to do, in a sentence. */
export class EngineError extends Error {
  override readonly name = "EngineError";

  constructor(readonly code: ErrorCode, message: string) {
    super(message);
  }
}

/** A text from a file, safe to show: control characters escaped, shortened. */
export function shown(text: unknown, limit = 80): string {
  const escaped = escapeText(String(text).slice(0, limit + 1));
  return escaped.length > limit ? `${escaped.slice(0, limit - 1)}…` : escaped;
}

const UNPRINTABLE = /(?! )[\p{C}\p{Zl}\p{Zp}\p{Zs}]/gu;
const SHORT: Record<string, string> = { "\n": "\\n", "\r": "\\r", "\t": "\\t" };

/** Characters that cannot be printed, as Python writes them. */
export function escapeText(text: string): string {
  return text.replace(UNPRINTABLE, (character) => {
    const short = SHORT[character];
    if (short !== undefined) return short;
    const code = character.codePointAt(0) ?? 0, hex = code.toString(16);
    return code < 0x100 ? `\\x${hex.padStart(2, "0")}` : code < 0x10000 ? `\\u${hex.padStart(4, "0")}` : `\\U${hex.padStart(8, "0")}`;
  });
}
