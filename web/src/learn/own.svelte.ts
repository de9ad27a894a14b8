/** A picture's own pass, for the figures of the room Learn: it leaves the text and the place of the other rooms alone. */

import { api } from "../lib/api";
import { Resource } from "../lib/resource.svelte";
import { session } from "../lib/session.svelte";
import type { ModelView, PassView } from "../schema";
import type { Place } from "../scene/places/place";
import type { Figure } from "../scene/data/subject";

export interface Asked {
  readonly text: string;
  readonly bos: boolean;
  readonly adapter: string | undefined;
}

interface Found extends Asked {
  readonly pass: PassView;
}

export const passOf = async (asked: Asked): Promise<Found> => {
  const pass = await api.pass({ text: asked.text, add_special_tokens: asked.bos, adapter: asked.adapter ?? null });
  return { ...asked, pass };
};

export class OwnPass implements Figure {
  readonly asked: Resource<Found>;
  #place: Place = $state.raw({ depth: 0, pos: 0, layer: 0, head: 0 });

  /** `ask` is called again where what it reads changes. */
  constructor(first: Place, ask: () => Promise<Found> | null) {
    this.#place = first;
    this.asked = new Resource(() => (session.model ? ask() : null));
  }

  get model(): ModelView | undefined {
    return session.model;
  }

  get pass(): PassView | undefined {
    return this.model && this.asked.value?.pass;
  }

  get text(): string {
    return this.asked.value?.text ?? "";
  }

  get bos(): boolean {
    return this.asked.value?.bos ?? true;
  }

  readonly ids = undefined;

  /** Within the model and the text that are there: a figure may have been written for larger ones. */
  readonly place: Place = $derived.by(() => {
    const { pass, model } = this;
    if (!pass || !model) return this.#place;
    const { pos, layer, head } = this.#place;
    const { L, N } = model.shape;
    return { ...this.#place, pos: Math.min(pos, pass.tokens.length - 1), layer: Math.min(layer, L - 1), head: Math.min(head, N - 1) };
  });

  get going(): Place {
    return this.place;
  }

  go(to: Partial<Pick<Place, "pos" | "layer" | "head">>): void {
    this.#place = { ...this.place, ...to };
  }

  open = (place: Place): void => {
    this.#place = place;
  };
}
