/** An answer as a link names it: the pass that it continues, and each token with how it came: `1a2b3c4d-d284-g123-f55`. */

export type How = "drawn" | "greedy" | "forced";
export interface Said {
  how: How;
  id: number;
}

const LETTERS: Record<string, How> = { d: "drawn", g: "greedy", f: "forced" };
const NAMED = 12; // digits of the pass's name that a link holds

/** The tokens of an answer to this pass; of another pass's answer, or of anything else, none. */
export function readAnswer(text: string, passId: string, most: number): readonly Said[] {
  const [name, ...parts] = text.split("-");
  if (name !== passId.slice(0, NAMED) || parts.length > most) return [];
  const said = parts.map((part) => ({ how: LETTERS[part[0] ?? ""], id: Number(/^[a-z]\d{1,9}$/.test(part) ? part.slice(1) : NaN) }));
  return said.every((one): one is Said => one.how !== undefined && Number.isInteger(one.id)) ? said : [];
}

export function writeAnswer(said: readonly Said[], passId: string): string {
  return said.length ? [passId.slice(0, NAMED), ...said.map(({ how, id }) => `${how[0]}${id}`)].join("-") : "";
}
