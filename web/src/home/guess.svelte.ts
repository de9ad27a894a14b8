/** The next token of the text: the best candidates, their probabilities at the chosen temperature, and how the text is written on. */
import { api } from "../lib/api";
import { Resource } from "../lib/resource.svelte";
import { session } from "../lib/session.svelte";
import type { CandidateView, PassView } from "../schema";
import { atTemperature, isControl } from "./bars";

const BARS = 5;
const MOST_WRITTEN = 24; // tokens of one "Write on"
const TOKEN_MS = 320; // between two of them, so that each is seen

/** How adventurous choices are, in all views that choose. */
export const temperature = $state({ value: 1 });

interface Found {
  readonly pass: PassView;
  readonly candidates: readonly CandidateView[];
}

export interface Bar {
  readonly id: number;
  readonly text: string;
  readonly probability: number;
}

async function best(pass: PassView): Promise<Found> {
  const { candidates } = await api.of(pass, "next", { position: pass.tokens.length - 1, k: BARS });
  return { pass, candidates };
}

async function all(pass: PassView): Promise<{ pass: PassView; logits: Float32Array }> {
  const { values } = await api.activation(pass, "logits", { position: pass.tokens.length - 1 });
  return { pass, logits: values };
}

export class Guess {
  readonly next = new Resource(() => (session.pass ? best(session.pass) : null));
  /** The logits of all tokens, which only another temperature needs. */
  readonly #all = new Resource(() => (session.pass && temperature.value !== 1 ? all(session.pass) : null));
  isWriting = $state(false);
  /** Whether the model ended the text by itself. */
  hasEnded = $state(false);
  #turn = 0;

  /** The bars of the pass that is shown; those of an earlier one until its own have come. */
  readonly bars: readonly Bar[] = $derived.by(() => {
    const found = this.next.value;
    if (!found) return (this.#before = []);
    const logits = temperature.value === 1 ? undefined : this.#all.value;
    if (temperature.value !== 1 && logits?.pass !== found.pass) return this.#before;
    const shares = logits && atTemperature(found.candidates, logits.logits, temperature.value);
    this.#before = found.candidates.map(({ token_id: id, text, probability }, i) => ({ id, text, probability: shares?.[i] ?? probability }));
    return this.#before;
  });
  #before: readonly Bar[] = [];

  /** Whether the bars are of the text as it stands in the line. */
  get isCurrent(): boolean {
    const { pass } = session;
    if (!pass || this.next.value?.pass !== pass || session.asked.text !== session.draft) return false;
    return temperature.value === 1 || this.#all.value?.pass === pass;
  }

  async add({ id, text }: Pick<Bar, "id" | "text">): Promise<void> {
    this.hasEnded = false;
    await session.append([{ id, text }], "f");
  }

  /** Write token after token, each drawn at the temperature. */
  async write(): Promise<void> {
    const mine = ++this.#turn;
    this.isWriting = true;
    this.hasEnded = false;
    try {
      for (let i = 0; i < MOST_WRITTEN; i++) {
        const [pass, begun] = [session.pass, performance.now()];
        if (!pass) return;
        const seed = Math.floor(Math.random() * 2 ** 32);
        const { token_id: id } = await api.post(pass, "sampler", { temperature: temperature.value, seed, position: pass.tokens.length - 1, k: 1 });
        const { text, is_special: isSpecial } = await api.send("word", { word: id });
        if (mine !== this.#turn || session.pass !== pass) return;
        if (isSpecial || isControl(text)) {
          this.hasEnded = true;
          return;
        }
        await session.append([{ id, text }], "d");
        if (session.pass === pass) return; // it was refused: the page says why
        await new Promise((done) => setTimeout(done, Math.max(0, TOKEN_MS - (performance.now() - begun))));
        if (mine !== this.#turn) return;
      }
    } catch (error) {
      if (mine === this.#turn) session.fail(error);
    } finally {
      if (mine === this.#turn) this.isWriting = false;
    }
  }

  stop(): void {
    this.#turn++;
    this.isWriting = false;
  }
}
