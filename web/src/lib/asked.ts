/** What a pass is asked for by: a text, or its tokens. */
import type { PassRequest } from "../schema";
import { textsFor } from "./texts";

export interface Asked {
  text: string;
  bos: boolean;
  /** The tokens by their ids, where they are looked at in place of the text. */
  ids: readonly number[] | undefined;
  /** How each of the last of these ids came, which answer the others. */
  answer: string;
  adapter: string | undefined;
}

/** What is asked for where neither the reader nor a link names a text; the model may have a better one. */
export const OPENING: Asked = { text: textsFor(undefined)[0], bos: true, ids: undefined, answer: "", adapter: undefined };

/** Whether two ask for the same pass. */
export function isSame(one: Asked, other: Asked): boolean {
  const same = (["text", "bos", "adapter", "answer"] as const).every((name) => one[name] === other[name]);
  return same && one.ids?.join() === other.ids?.join();
}

export function textOf(tokens: readonly { text: string }[]): string {
  return tokens.map(({ text }) => text).join("");
}

/** The request for a pass. */
export function requestOf({ text, bos, ids, adapter: named }: Asked): PassRequest {
  const adapter = named ?? null;
  return ids ? { ids: [...ids] as [number, ...number[]], adapter } : { text, add_special_tokens: bos, adapter };
}
