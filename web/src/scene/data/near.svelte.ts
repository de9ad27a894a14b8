/** What the entered depths are drawn from, asked for as a place is entered. What has been left stays until something else comes, so that the way out is seen. */

import { untrack } from "svelte";
import { Resource } from "../../lib/resource.svelte";
import { sampling } from "../../lib/sampling.svelte";
import { around } from "../../lib/window";
import type { PassView } from "../../schema";
import { askBlock, askLayer, askProduct, MOST_TOKENS, type Asker } from "./asks";
import type { Near } from "./near";
import type { Place } from "../places/place";
import type { Subject } from "./subject";

/** With the pass that it is of: what is of another one is not shown. */
interface Of<T> {
  readonly pass: PassView;
  readonly numbers: T;
}

const OUTSIDE = ["text", "row", "logits"]; // blocks that are in no layer
const OF_HEAD = ["rope", "attention"]; // that show one head

export class NearData {
  readonly #subject: Subject;
  readonly #layer: Resource<Of<Near["layer"]>>;
  readonly #block: Resource<Of<Near["block"]>>;
  readonly #product: Resource<Of<Near["product"]>>;

  /** `place` is where the picture is, or goes. */
  constructor(subject: Subject, place: () => Place) {
    this.#subject = subject;
    const last = new Last();
    const tokens = $derived(subject.pass?.tokens.length ?? 0);
    const layerKey = $derived(keyOf(last.layer(place()), (at) => [at.layer, around(at.pos, tokens, MOST_TOKENS).start]));
    const blockKey = $derived(keyOf(last.block(place()), (at) => [at.pos, at.layer, at.block, OF_HEAD.includes(at.block ?? "") ? at.head : 0]));
    const productKey = $derived(keyOf(last.product(place()), (at) => [at.pos, at.layer, at.product, at.row ?? 0]));
    const ask = <T>(key: string, at: () => Place | undefined, work: (asker: Asker, at: Place) => Promise<T>): Promise<Of<T>> | null => {
      const { pass, model } = subject;
      const where = key ? untrack(at) : undefined; // another place with the same key is no other question
      if (!pass || !model || !where || where.pos >= pass.tokens.length) return null;
      return work({ pass, model }, where).then((numbers) => ({ pass, numbers }));
    };
    this.#layer = new Resource(() => ask(layerKey, () => last.layer(place()), askLayer));
    this.#block = new Resource(() => {
      void (blockKey.includes("logits") && sampling.text); // the cut follows the sampler's parameters
      const { text, bos, ids } = subject;
      return ask(blockKey, () => last.block(place()), (asker, at) => askBlock(asker, at, at.block ?? "attention", { text, bos, isByIds: ids !== undefined }));
    });
    this.#product = new Resource(() => ask(productKey, () => last.product(place()), (asker, at) => askProduct(asker, at, at.product ?? "q_proj")));
  }

  readonly near: Near = $derived.by(() => {
    const now = <T>(found: Of<T> | undefined): T | undefined => (found && found.pass.id === this.#subject.pass?.id ? found.numbers : undefined);
    return { layer: now(this.#layer.value), block: now(this.#block.value), product: now(this.#product.value) };
  });

  /** What is waited for, or was refused; the deepest first. */
  get asked(): readonly Resource<unknown>[] {
    return [this.#product, this.#block, this.#layer];
  }
}

const keyOf = (place: Place | undefined, of: (place: Place) => readonly unknown[]): string => (place ? of(place).join(" ") : "");

/** The last place of each depth. */
class Last {
  #layer: Place | undefined;
  #block: Place | undefined;
  #product: Place | undefined;

  layer(place: Place): Place | undefined {
    if (place.depth >= 1 && !OUTSIDE.includes(place.block ?? "")) this.#layer = place;
    return this.#layer;
  }

  block(place: Place): Place | undefined {
    if (place.depth >= 2 && place.block) this.#block = place;
    return this.#block;
  }

  product(place: Place): Place | undefined {
    if (place.depth >= 3 && place.product) this.#product = place;
    return this.#product;
  }
}
