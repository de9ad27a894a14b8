/** Tokens behind the text: drawn from what the model says after the last one with the sampler's parameters, the most probable, or given. */

import { api } from "./api";
import { MOST_ANSWER } from "./link";
import { sampling } from "./sampling.svelte";
import { session } from "./session.svelte";

class Growing {
  busy = $state(false);
  #turn = 0;

  /** Whether an answer may be longer. */
  get isFull(): boolean {
    return session.answer.length >= MOST_ANSWER;
  }

  /** Choose so many tokens, one after the other, as long as each is taken and nothing else is looked at. */
  choose(how: "d" | "g", times = 1): Promise<void> {
    return this.#work(async (isMine) => {
      const params = how === "g" ? { temperature: 0 } : { ...sampling.params };
      for (let i = 0; i < times && !this.isFull; i++) {
        const { pass } = session;
        if (!pass) return;
        const position = pass.tokens.length - 1;
        const { token_id: id } = await api.post(pass, "sampler", { ...params, position, start: session.answerAt, k: 1 });
        const { text } = await api.send("word", { word: id });
        if (!isMine() || session.pass !== pass) return;
        await session.append([{ id, text }], how);
        if (session.pass === pass) return; // it was refused: the page says why
      }
    });
  }

  /** Put what was written behind the text. */
  force(text: string): Promise<void> {
    return this.#work(async (isMine) => {
      const { pass } = session;
      const { tokens } = await api.send("tokens", { text, add_special_tokens: false, tokenizer: "model" });
      if (isMine() && session.pass === pass) await session.append(tokens.slice(0, MOST_ANSWER - session.answer.length), "f");
    });
  }

  /** What is under way chooses no further token. */
  stop(): void {
    this.#turn++;
    this.busy = false;
  }

  async #work(work: (isMine: () => boolean) => Promise<void>): Promise<void> {
    if (this.busy) return;
    const mine = ++this.#turn;
    this.busy = true;
    try {
      await work(() => mine === this.#turn);
    } catch (error) {
      if (mine === this.#turn) session.fail(error);
    } finally {
      if (mine === this.#turn) this.busy = false;
    }
  }
}

export const growing = new Growing();
