/** A link names exactly one view: `#stage=norm&layer=7&head=3&pos=12&text=...`. A key or a ticket may stand there once, to be taken. */

/** How a token of an answer came: drawn, greedy or forced. */
export type How = "d" | "g" | "f";

export const MOST_ANSWER = 64; // tokens of an answer

export interface View {
  stage: string;
  layer: number;
  head: number;
  pos: number;
  text: string;
  bos: boolean;
  /** The token that is asked about, by its id; the most probable one where none is chosen. */
  token?: number | undefined;
  /** The tokens by their ids, where they are looked at and not the text: those of a conversation, which no text gives. */
  ids?: readonly number[] | undefined;
  /** How each of the last of these ids came, which answer the others: a letter for each. */
  answer?: string | undefined;
  /** The adapter that is on the model. */
  adapter?: string | undefined;
  /** The view's own inputs by name: a second text, a strength. */
  fields: Readonly<Record<string, string>>;
}

/** The last token, of whatever text: where a link names no token; also no layer and no head. */
export const LAST = Number.MAX_SAFE_INTEGER;

const NAMED = new Set(["stage", "layer", "head", "pos", "token", "text", "bos", "ids", "answer", "adapter", "key", "ticket"]);
const FIELD = /^[a-z][a-z_]{0,30}$/;
const ANSWER = new RegExp(`^[dgf]{1,${MOST_ANSWER}}$`);
const IDS = /^\d{1,6}(-\d{1,6})*$/;

const whole = (text: string | null): number | undefined => (text !== null && /^\d{1,6}$/.test(text) ? Number(text) : undefined);

/** Read what a fragment names; what it does not name, or names badly, is left out. */
export function readLink(hash: string): { view: Partial<View>; key?: string; ticket?: string } {
  const named = new URLSearchParams(hash.replace(/^#/, ""));
  const view: Partial<View> = {};
  const stage = named.get("stage");
  if (stage !== null) view.stage = stage;
  for (const name of ["layer", "head", "pos", "token"] as const) {
    const value = whole(named.get(name));
    if (value !== undefined) view[name] = value;
  }
  const text = named.get("text");
  if (text !== null) view.text = text;
  const bos = named.get("bos");
  if (bos !== null) view.bos = bos !== "0";
  const ids = named.get("ids");
  if (ids !== null && IDS.test(ids)) view.ids = ids.split("-").map(Number);
  const answer = named.get("answer") ?? "";
  if (ANSWER.test(answer) && answer.length < (view.ids?.length ?? 0)) view.answer = answer;
  const adapter = named.get("adapter");
  if (adapter) view.adapter = adapter;
  view.fields = Object.fromEntries([...named].filter(([name]) => FIELD.test(name) && !NAMED.has(name)));
  const key = named.get("key");
  const ticket = named.get("ticket");
  return { view, ...(key === null ? {} : { key }), ...(ticket === null ? {} : { ticket }) };
}

/** Return the fragment that names a view; never a key or a ticket. */
export function writeLink(view: View): string {
  const named = new URLSearchParams();
  named.set("stage", view.stage);
  for (const name of ["layer", "head", "pos"] as const) if (view[name] !== LAST) named.set(name, String(view[name]));
  if (view.token !== undefined) named.set("token", String(view.token));
  if (!view.bos) named.set("bos", "0");
  named.set("text", view.text);
  if (view.ids) named.set("ids", view.ids.join("-"));
  if (view.ids && view.answer) named.set("answer", view.answer);
  if (view.adapter !== undefined) named.set("adapter", view.adapter);
  for (const [name, value] of Object.entries(view.fields)) if (value !== "") named.set(name, value);
  return `#${named.toString().replaceAll("+", "%20")}`;
}
