/** A picture's own pass, for the figures of the room Learn: it leaves the text and the place of the other rooms alone. */

import { api, Refusal } from "../lib/api";
import { Resource } from "../lib/resource.svelte";
import { session } from "../lib/session.svelte";
import type { ModelView, PassView } from "../schema";
import type { Data } from "../scene/data/data";
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

const passOf = async (asked: Asked): Promise<Found> => {
  const pass = await api.pass({ text: asked.text, add_special_tokens: asked.bos, adapter: asked.adapter ?? null });
  return { ...asked, pass };
};

/** The pass of the first text that is accepted and that fits; the last one must. */
export async function firstThatFits(texts: readonly Asked[], fits: (pass: PassView) => boolean): Promise<Found> {
  for (const asked of texts.slice(0, -1)) {
    try {
      const found = await passOf(asked);
      if (fits(found.pass)) return found;
    } catch (error) {
      if (!(error instanceof Refusal) || error.status < 400 || [401, 429].includes(error.status) || error.status >= 500) throw error;
    }
  }
  return passOf(texts.at(-1) as Asked);
}

export class OwnPass implements Figure {
  readonly asked: Resource<Found>;
  /** All numbers that have come, also those that are not drawn yet. */
  data = $state.raw<Data | undefined>();
  #place: Place = $state.raw({ depth: 0, pos: 0, layer: 0, head: 0 });
  readonly #shown: (data: Data) => Data;

  /** `ask` is called again where what it reads changes; `shown` says which of the numbers are drawn. */
  constructor(first: Place, ask: () => Promise<Found> | null, shown: (data: Data) => Data = (data) => data) {
    this.#place = first;
    this.#shown = shown;
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

  shown(data: Data): Data {
    return this.#shown(data);
  }

  came(data: Data): void {
    this.data = data;
  }
}
