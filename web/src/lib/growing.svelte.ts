/** One more token: it is drawn from what the model says after the last one, with the sampler's parameters, and put behind the text. */

import { api } from "./api";
import { sampling } from "./sampling.svelte";
import { session } from "./session.svelte";

class Growing {
  busy = $state(false);
  /** The text that was grown, and where it began to. */
  #grown: { id: string; start: number } | undefined;

  async one(): Promise<void> {
    const { pass } = session;
    if (!pass || this.busy) return;
    this.busy = true;
    const last = pass.tokens.length - 1;
    const start = this.#grown?.id === pass.id ? this.#grown.start : pass.tokens.length;
    try {
      const { token_id: id } = await api.sampler(pass, { ...sampling.params, position: last, start, k: 1 });
      const { text } = await api.word({ word: id });
      if (session.pass !== pass) return;
      await session.append({ id, text });
      if (session.pass) this.#grown = { id: session.pass.id, start };
    } catch (error) {
      session.fail(error);
    } finally {
      this.busy = false;
    }
  }
}

export const growing = new Growing();
