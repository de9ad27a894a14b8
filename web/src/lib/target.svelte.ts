/** The next token that a stage is about: the chosen one, or the most probable one after the token that is looked at. */
import type { CandidateView, TokenView } from "../schema";
import { api } from "./api";
import { Resource } from "./resource.svelte";
import { session } from "./session.svelte";

const CANDIDATES = 6;

export class Target {
  /** What may come next, the most probable first. */
  readonly next = new Resource(() => (session.pass ? api.of(session.pass, "next", { position: session.pos, k: CANDIDATES }) : null));
  readonly #named: Resource<TokenView> = new Resource(() => (this.id === undefined ? null : api.send("word", { word: this.id })));

  get candidates(): readonly CandidateView[] {
    return this.next.value?.position === session.pos ? this.next.value.candidates : [];
  }

  get id(): number | undefined {
    return session.token ?? this.candidates[0]?.token_id;
  }

  get text(): string {
    return this.#named.value?.id === this.id ? (this.#named.value?.text ?? "") : "";
  }
}
