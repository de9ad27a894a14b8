/** The conversation of this tab: kept for as long as the tab is, whatever becomes of the server. */

import { Refusal } from "../lib/api";
import { sampling, type Form, type Parameters } from "../lib/sampling.svelte";
import { stream } from "./events";
import { added, changed, EMPTY, grown, messages, newTurn, path, restored, without, type Asked, type Tree, type Turn } from "./turns";

const KEY = "llamarium-chat-2"; // another number where what is kept has another form
const SAVE_MS = 500;
const SEEDS = 1000;

/** What is asked with every turn, as it stands in the fields. */
export interface Choices {
  system: string;
  maxTokens: string;
  adapter: string;
  tools: string;
  schema: string;
}

interface Kept {
  tree: Tree;
  draft: string;
  edits: Record<number, string>;
  results: Record<string, string>;
  choices: Choices;
  params: Parameters;
}

const CHOICES: Choices = { system: "", maxTokens: "256", adapter: "", tools: "", schema: "" };

/** A field that says something else than it should. */
class Mistaken extends Error {}

class Conversation {
  tree = $state.raw<Tree>(EMPTY);
  /** The turns that are shown. */
  readonly turns = $derived(path(this.tree));
  draft = $state("");
  /** Texts of turns that are being edited, by the turn's id. */
  edits = $state<Record<number, string>>({});
  /** Results that are being typed in, by the call's id. */
  results = $state<Record<string, string>>({});
  choices = $state<Choices>({ ...CHOICES });
  /** Why what stands in the fields cannot be asked. */
  mistake = $state("");
  /** Whether the tab keeps it: its memory for this is bounded. */
  isKept = $state(true);
  #coming = $state.raw<AbortController | undefined>();
  #timer: ReturnType<typeof setTimeout> | undefined;

  constructor() {
    const text = sessionStorage.getItem(KEY);
    if (text !== null) this.#restore(text);
    addEventListener("pagehide", () => this.#leave());
  }

  get isComing(): boolean {
    return this.#coming !== undefined;
  }

  /** Ask with what stands below the conversation. */
  async send(isDialog: boolean): Promise<void> {
    if (!this.draft || this.isComing) return;
    const asked = this.#check();
    if (!asked) return;
    const turn = newTurn(this.tree, this.turns.at(-1)?.id ?? 0, "user", { text: this.draft });
    this.tree = added(this.tree, turn);
    this.draft = "";
    await this.#answer(turn.id, asked, isDialog);
  }

  /** Put another version beside a turn of the reader's, and ask with it. */
  async resend(turn: Turn, text: string, isDialog: boolean): Promise<void> {
    if (this.isComing) return;
    const asked = this.#check();
    if (!asked) return;
    delete this.edits[turn.id];
    const other = newTurn(this.tree, turn.parent, "user", { text });
    this.tree = added(this.tree, other);
    await this.#answer(other.id, asked, isDialog);
  }

  /** Put another answer beside one: asked for alike where it broke off, so that it is the same one, else as the fields say, with the next seed. */
  async again(turn: Turn, isDialog: boolean): Promise<void> {
    if (this.isComing) return;
    const isSame = turn.state === "unfinished" && turn.asked !== null;
    if (!isSame) sampling.set({ seed: (sampling.params.seed + 1) % SEEDS });
    const asked = isSame ? turn.asked : this.#check();
    if (!asked) return;
    if (!turn.tokens.length) this.tree = without(this.tree, turn.id);
    await this.#answer(turn.parent, asked, isDialog);
  }

  /** Give the results of an answer's calls, and have the model go on. */
  async giveResults(turn: Turn, results: Record<string, string>): Promise<void> {
    if (this.isComing) return;
    const asked = this.#check();
    if (!asked) return;
    for (const id of Object.keys(results)) delete this.results[id];
    const told = newTurn(this.tree, turn.id, "tool", { results });
    this.tree = added(this.tree, told);
    await this.#answer(told.id, asked, true);
  }

  /** Show another version of a turn. */
  show(turn: Turn): void {
    this.tree = { ...this.tree, chosen: { ...this.tree.chosen, [turn.parent]: turn.id } };
    this.save();
  }

  stop(): void {
    this.#coming?.abort();
  }

  clear(): void {
    this.stop();
    this.tree = EMPTY;
    this.edits = {};
    this.results = {};
    this.save();
  }

  save(): void {
    clearTimeout(this.#timer);
    this.#timer = undefined;
    const { tree, draft, edits, results, choices } = this;
    const kept: Kept = { tree, draft, edits, results, choices, params: sampling.params };
    try {
      sessionStorage.setItem(KEY, JSON.stringify(kept));
      this.isKept = true;
    } catch {
      this.isKept = false;
    }
  }

  /** Keep it soon. */
  touch(): void {
    this.#timer ??= setTimeout(() => this.save(), SAVE_MS);
  }

  /** The page goes, and with it what is coming. */
  #leave(): void {
    this.tree = restored(this.tree);
    this.save();
  }

  #restore(text: string): void {
    try {
      const kept = JSON.parse(text) as Kept;
      this.tree = restored(kept.tree);
      this.draft = kept.draft;
      this.edits = kept.edits;
      this.results = kept.results;
      this.choices = { ...CHOICES, ...kept.choices };
      sampling.set(kept.params);
    } catch {
      sessionStorage.removeItem(KEY); // of another version of this page
    }
  }

  /** Read the fields; where one is mistaken, say so and return nothing. */
  #check(): Asked | undefined {
    this.mistake = "";
    try {
      return this.#asked();
    } catch (error) {
      if (!(error instanceof Mistaken)) throw error;
      this.mistake = error.message;
      return undefined;
    }
  }

  #asked(): Asked {
    const { choices } = this;
    const tools = json("Tools", choices.tools);
    const schema = json("JSON schema", choices.schema);
    const maxTokens = choices.maxTokens.trim() === "" ? null : Number(choices.maxTokens);
    if (maxTokens !== null && !Number.isInteger(maxTokens)) throw new Mistaken("Most tokens: expected a whole number, or nothing");
    const adapter = choices.adapter || null;
    const params = { ...sampling.params };
    const form = {
      ...(tools === undefined ? {} : { tools }),
      ...(schema === undefined ? {} : { response_format: { type: "json_schema", json_schema: { name: "answer", schema } } }),
    } as Form; // the server says what is wrong with it
    return { system: choices.system, params, maxTokens, adapter, form };
  }

  async #answer(parent: number, asked: Asked, isDialog: boolean): Promise<void> {
    const before = path(this.tree, parent);
    const turn = newTurn(this.tree, parent, "assistant", { state: "coming", asked });
    this.tree = added(this.tree, turn);
    const coming = (this.#coming = new AbortController());
    const change = (by: (turn: Turn) => Turn): void => {
      this.tree = changed(this.tree, turn.id, by);
      this.touch();
    };
    try {
      for await (const chunks of stream(...question(before, asked, isDialog), coming.signal)) {
        change((one) => chunks.reduce(grown, one));
      }
      change((one) => ({ ...one, state: "whole" }));
    } catch (error) {
      const told = coming.signal.aborted ? "stopped" : why(error);
      change((one) => (one.state === "coming" ? { ...one, state: "unfinished", why: told } : one));
    } finally {
      if (this.#coming === coming) this.#coming = undefined;
      this.save();
    }
  }
}

/** Where to ask, and what: a dialog, or a text that goes on where the model has none. */
export function question(before: readonly Turn[], asked: Asked, isDialog: boolean): [path: string, body: object] {
  const { system, params, maxTokens, adapter, form } = asked;
  const shared = {
    ...params,
    ...form,
    ...(maxTokens === null ? {} : { max_tokens: maxTokens }),
    ...(adapter === null ? {} : { model: adapter }),
    stream: true,
    return_token_ids: true,
  };
  if (isDialog) return ["/v1/chat/completions", { ...shared, messages: messages(before, system), logprobs: true }];
  return ["/v1/completions", { ...shared, prompt: before.map((turn) => turn.text).join(""), logprobs: 0 }];
}

/** Say why an answer broke off, whatever it was. */
function why(error: unknown): string {
  if (!(error instanceof Refusal)) return `the page failed: ${String(error)}`;
  return error.status === 429 ? `${error.message} (in ${error.retryAfter} s)` : error.message;
}

function json(field: string, text: string): unknown {
  if (!text.trim()) return undefined;
  try {
    return JSON.parse(text) as unknown;
  } catch (error) {
    throw new Mistaken(`${field}: this is no JSON: ${error instanceof Error ? error.message : String(error)}`);
  }
}

export const conversation = new Conversation();
