/** What the server's engine is doing, requested again and again while it is shown. */

import { json, Refusal } from "../lib/api";
import { visible } from "../lib/format";
import { session } from "../lib/session.svelte";
import type { OpenedView, PrefixView, RequestsView, SequenceState } from "../schema";

const EVERY_MS = 700;

/** An answer's name among those of a server. */
export const named = (one: { number: number; row: number }): string => `${one.number}.${one.row}`;

/** Tokens that an answer was given in a second, between two looks. */
export function rate(before: RequestsView | undefined, now: RequestsView, one: SequenceState): number | undefined {
  const same = before?.requests.find((other) => named(other) === named(one));
  if (!before || !same || now.at_s <= before.at_s) return undefined;
  return (one.num_tokens - same.num_tokens) / (now.at_s - before.at_s);
}

/** Where a prompt and the earlier one part: the token, the fields, and the texts around it; nothing if they do not. */
export function parting(one: PrefixView): [name: string, text: string][] {
  if (one.first_different_token === null) return [];
  const gone = "not cached any more";
  return [
    ["first different token", one.first_different_token + (one.is_exact ? "" : ` or later, as the earlier one's is ${gone}`)],
    ["in", [one.field ?? "the template's text", ...one.other_fields].join(", ")],
    ["both before it", visible(one.text_before)],
    ["this prompt", visible(one.text)],
    ["the earlier prompt", one.earlier_text === null ? gone : visible(one.earlier_text)],
  ];
}

export class Live {
  now = $state.raw<RequestsView | undefined>();
  before = $state.raw<RequestsView | undefined>();
  error = $state.raw<unknown>();

  /** Request until the component that made this goes, or the server does not show them; a hidden page sends no requests. */
  constructor() {
    $effect(() => {
      void session.model; // of another server, which may show them
      let timer: ReturnType<typeof setTimeout> | undefined;
      let isOver = false;
      const look = async (): Promise<void> => {
        if (!document.hidden) await this.#look();
        if (!isOver && !this.isOff) timer = setTimeout(() => void look(), EVERY_MS);
      };
      void look();
      return () => {
        isOver = true;
        clearTimeout(timer);
      };
    });
  }

  async #look(): Promise<void> {
    try {
      const found = await json<RequestsView>("GET", "/inspect/requests");
      this.before = this.now;
      this.now = found;
      this.error = undefined;
    } catch (error) {
      this.error = error;
    }
  }

  /** Whether the server was not told to show requests. */
  get isOff(): boolean {
    return this.error instanceof Refusal && this.error.code === "requests_not_inspected";
  }
}

export function open(one: SequenceState): Promise<OpenedView> {
  return json("GET", `/inspect/requests/${named(one)}?k=50`);
}
