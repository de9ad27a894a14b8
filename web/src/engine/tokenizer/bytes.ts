/** Bytes as GPT-2's vocabularies print them, and as pieces are shown. */
import { escapeText } from "../errors.ts";

/** The printable character of each byte. */
export const CHARACTERS: readonly string[] = (() => {
  let next = 256;
  const isPrinted = (byte: number) => (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
  return Array.from({ length: 256 }, (_, byte) => String.fromCodePoint(isPrinted(byte) ? byte : next++));
})();

const BYTES = new Map(CHARACTERS.map((character, byte) => [character, byte]));
const encoder = new TextEncoder(), decoder = new TextDecoder("utf-8", { ignoreBOM: true }), strict = new TextDecoder("utf-8", { ignoreBOM: true, fatal: true });

export const utf8 = (text: string): Uint8Array => encoder.encode(text);

/** Bytes that are no UTF-8 become U+FFFD. */
export const fromUtf8 = (bytes: Uint8Array): string => decoder.decode(bytes);

/** A printed token's bytes; null where a character stands for none. */
export function bytesOf(printed: string): Uint8Array | null {
  const bytes = Array.from(printed, (character) => BYTES.get(character));
  return bytes.includes(undefined) ? null : Uint8Array.from(bytes as number[]);
}

/** Bytes as a printable piece of at most 200 characters: stray bytes as `\xe4`. */
export function pieceOf(bytes: Uint8Array): string {
  let text = "";
  for (let at = 0; at < bytes.length;) {
    const first = bytes[at] as number, length = first < 0x80 ? 1 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
    try {
      text += strict.decode(bytes.subarray(at, at + length));
      at += length;
    } catch {
      text += `\\x${first.toString(16).padStart(2, "0")}`;
      at++;
    }
  }
  const characters = [...text.slice(0, 402)].slice(0, 201), escaped = [...escapeText(characters.join(""))];
  return escaped.length > 200 ? `${escaped.slice(0, 199).join("")}…` : escaped.join("");
}
