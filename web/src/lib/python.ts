/** Lines of Python that make a view's numbers again: what stands in them is written as Python's own literals. */

import { counted } from "./format";
import { session } from "./session.svelte";

/** A string literal: JSON's, which Python reads alike, with all that is not seen or changes direction as its number. */
export function quoted(text: string): string {
  return JSON.stringify(text).replace(/\p{C}|(?! )\p{Z}/gu, (one) => {
    const code = (one.codePointAt(0) ?? 0).toString(16);
    return code.length > 4 ? `\\U${code.padStart(8, "0")}` : `\\u${code.padStart(4, "0")}`;
  });
}

/** A literal of what JSON has, too. */
export function literal(value: unknown): string {
  if (value === null || value === undefined) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value === "string") return quoted(value);
  if (typeof value === "number") return Number.isFinite(value) ? String(value) : `float("${value > 0 ? "inf" : value < 0 ? "-inf" : "nan"}")`;
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  return `{${Object.entries(value).map(([name, one]) => `${quoted(name)}: ${literal(one)}`).join(", ")}}`;
}

/** Arguments of a call by their names, those that are there: `k=3, layer=7`. */
export function named(fields: Readonly<Record<string, unknown>>): string {
  return Object.entries(fields)
    .filter(([, value]) => value !== undefined && value !== null)
    .map(([name, value]) => `${name}=${literal(value)}`)
    .join(", ");
}

/** The same text up to a token, as a request for its greedy answer with what is done `inside`; see docs/guides/serving.md. */
export function request(inside: object): string {
  const { pass, pos, adapter } = session;
  const prompt = pass?.tokens.slice(0, pos + 1).map(({ id }) => id);
  const body = JSON.stringify({ ...(adapter && { model: adapter }), prompt, max_tokens: 12, temperature: 0, ...inside });
  return `curl ${location.origin}/v1/completions -H 'content-type: application/json' \\\n  -d '${body.replaceAll("'", "\\u0027")}'\n`;
}

/** A whole program: the model as the server has it, the ids of the text, and a view's lines, which end in `numbers`. */
export function program(lines: readonly string[]): string {
  const { model, pass, text, bos, ids, adapter } = session;
  const options = named(model?.loaded_with ?? {});
  const encoded = ids ? literal([...ids]) : bos ? `llama.encode(${quoted(text)})` : `llama.tokenizer.encode(${quoted(text)}, add_special_tokens=False)`;
  return [
    "import llamarium",
    "",
    `llama = llamarium.load(${quoted(model?.name ?? "")}${options && `, ${options}`})`,
    `ids = ${encoded}  # ${counted(pass?.tokens.length ?? 0, "token")}`,
    ...(adapter ? [`# The page has put the server's adapter ${quoted(adapter)} on: load it with adapter=FOLDER.`] : []),
    ...lines,
    "print(numbers)",
    "",
  ].join("\n");
}
