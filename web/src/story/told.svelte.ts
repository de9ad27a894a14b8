/** What the story shows: the pass of the page's text, the token that asks, and the head in which it looks back most. */
import { lookOf } from "../lib/opening.svelte";
import { Resource } from "../lib/resource.svelte";
import { session } from "../lib/session.svelte";
import type { ModelView, PassView } from "../schema";
import { unitOf } from "../home/bars";
import type { Look } from "../lib/telling";
import type { Unit } from "./words";

export const [LEAST_TOKENS, MOST_TOKENS] = [3, 14] as const; // of a text that the cards can draw
const END_TOKENS = 10; // of a longer one: by themselves they may be split into a few more

export class Told {
  /** The token that asks, where one was chosen. */
  #chosen = $state<number | undefined>();
  readonly looks: Resource<{ query: number; look: Look }>;

  constructor() {
    this.looks = new Resource(() => this.#look());
  }

  get model(): ModelView | undefined {
    return session.model;
  }

  /** The pass, if it is one that the cards can draw. */
  get pass(): PassView | undefined {
    const { pass } = session;
    return pass && pass.tokens.length >= LEAST_TOKENS && pass.tokens.length <= MOST_TOKENS ? pass : undefined;
  }

  /** Why the cards cannot be drawn of the page's text. */
  get refusal(): string {
    const { pass, model } = session;
    if (!pass || !model || this.pass) return "";
    return `The cards are drawn for texts of ${LEAST_TOKENS} to ${MOST_TOKENS} ${unitOf(model.shape.V, pass.tokens)}s; this one has ${pass.tokens.length}.`;
  }

  /** The last tokens of a text that is too long, as a text by itself; empty for others. */
  get end(): string {
    const tokens = session.pass?.tokens ?? [];
    return tokens.length > MOST_TOKENS ? tokens.slice(-END_TOKENS).map(({ text }) => text).join("").trim() : "";
  }

  get tokens(): PassView["tokens"] {
    return this.pass?.tokens ?? [];
  }

  get last(): number {
    return this.tokens.length - 1;
  }

  get unit(): Unit {
    return this.model && this.pass ? unitOf(this.model.shape.V, this.tokens) : "token";
  }

  /** The token that asks: the last one, unless another is chosen. The first two have too few tokens before them. */
  get query(): number {
    const chosen = this.#chosen ?? this.last;
    return chosen >= 2 && chosen <= this.last ? chosen : this.last;
  }

  choose(query: number): void {
    this.#chosen = query;
  }

  get look(): Look | undefined {
    const found = this.looks.value;
    return found?.query === this.query ? found.look : undefined;
  }

  text(pos: number): string {
    return this.tokens[pos]?.text ?? "";
  }

  #look(): Promise<{ query: number; look: Look }> | null {
    const { pass, model, query } = this;
    if (!pass || !model) return null;
    return lookOf(pass, model, query).then((look) => ({ query, look }));
  }
}
