/** The sampler's parameters, which hold through the stages that choose a token. */

import { untrack } from "svelte";
import type { SamplerRequest } from "../schema";
import { field } from "./field";

/** What an answer's form is asked for by. */
export type Form = Pick<SamplerRequest, "response_format" | "tools" | "tool_choice" | "parallel_tool_calls">;

export type Parameters = Required<Omit<SamplerRequest, "position" | "start" | "k" | keyof Form>>;

/** Each does nothing at these: the model's own probabilities are drawn from. */
const PLAIN: Parameters = {
  temperature: 1, top_k: 0, top_p: 1, min_p: 0, repetition_penalty: 1, presence_penalty: 0, frequency_penalty: 0, seed: 0,
};

const NAMES = Object.keys(PLAIN) as (keyof Parameters)[];

class Sampling {
  params = $state<Parameters>({ ...PLAIN, temperature: 0.8, top_k: 20, top_p: 0.9, repetition_penalty: 1.1 });

  set(changed: Partial<Parameters>): void {
    Object.assign(this.params, changed);
  }

  /** Take away everything but what is given. */
  only(changed: Partial<Parameters>): void {
    this.params = { ...PLAIN, seed: this.params.seed, ...changed };
  }

  /** All of them, as a link names them: numbers in one order, with commas. */
  get text(): string {
    return NAMES.map((name) => this.params[name]).join(",");
  }

  /** Take what a link names; anything else is left. What is out of range, the server refuses by name. */
  take(text: string): void {
    const values = text.split(",").map((one) => (one.trim() ? Number(one) : NaN));
    if (values.length !== NAMES.length || !values.every(Number.isFinite)) return;
    this.params = Object.fromEntries(NAMES.map((name, i) => [name, values[i]])) as Parameters;
  }
}

export const sampling = new Sampling();

/** Let the link of a view that chooses tokens name the parameters; called as the view begins. */
export function linked(): void {
  const named = field("sampling");
  $effect.pre(() => {
    const given = named.value;
    untrack(() => { if (given && given !== sampling.text) sampling.take(given); });
  });
  $effect(() => {
    if (named.value !== sampling.text) named.value = sampling.text; // also where the view is opened again by a link without them
  });
}
