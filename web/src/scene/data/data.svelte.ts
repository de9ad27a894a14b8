/** What the picture asks of the server, by depth: the whole in one reply, then the bars of the next token, then the lens, some tokens at a time. */

import { untrack } from "svelte";
import { api } from "../../lib/api";
import { Resource } from "../../lib/resource.svelte";
import type { ModelView, PassView } from "../../schema";
import { tokenOf, type Data, type Far, type Said } from "./data";
import { readFar, widened, withLens, type Window } from "./far";
import { joined, piecesOf } from "./pieces";
import type { Subject } from "./subject";

/** Of more tokens than these only some are columns, until a window of them is entered. */
export const MOST_TOKENS = 72;
const COLUMNS = 64; // of a long text
const MOST_IN_BLOCKS = 2048; // tokens of one whose blocks are computed; of a longer one columns are single tokens
export const WINDOW = 48; // tokens of one that are drawn one by one
const AT_ONCE = 4; // tokens of the lens
const CANDIDATES = 8;

/** Every so many tokens of a long text: there are at most `COLUMNS`. */
const strideOf = (tokens: number): number => (tokens <= MOST_TOKENS ? 1 : Math.ceil(tokens / COLUMNS));

/** All tokens, one by one or in blocks, or some: the last one ends a column in any case. */
function whole(tokens: number): Window {
  const block = strideOf(tokens);
  return { start: (tokens - 1) % block, stop: tokens, block, isMean: block > 1 && tokens <= MOST_IN_BLOCKS };
}

interface Found {
  readonly pass: PassView;
  /** None where it was stopped before anything had come. */
  readonly far: Far | undefined;
  /** Whether it was stopped before all columns were there. */
  readonly isPart?: boolean;
}

export class PictureData {
  readonly #subject: Subject;
  #window = $state.raw<{ start: number; stop: number } | undefined>();
  readonly #far = new Resource(() => (this.#subject.pass && this.#subject.model ? this.#askFar(this.#subject.pass, this.#subject.model.shape.L) : null));
  /** Of a long text it comes last: it needs the whole pass. */
  readonly #next = new Resource(() => (this.#subject.pass && this.#isReady(this.#subject.pass) ? this.#askNext(this.#subject.pass) : null));
  /** What has come of a long text. */
  #part = $state.raw<Found | undefined>();
  #isStopped = $state(false);
  /** Ends the piece that is being asked for. */
  #asking: AbortController | undefined;
  #said = $state.raw<{ pass: PassView; of: Far; said: Said } | undefined>();
  /** Whether the lens is being read. */
  isReading = $state(false);
  /** What was drawn last: it stays until the next pass is there. */
  #before: Data | undefined;
  #drawn: PassView | undefined;

  constructor(subject: Subject) {
    this.#subject = subject;
    $effect(() => {
      const found = this.#far.value;
      if (found?.far && !found.isPart && found.pass === this.#subject.pass) return this.#readLens(found.pass, found.far);
      return undefined;
    });
  }

  /** Of a long text the tokens that are looked at one by one; none of a text that ends before them. */
  get window(): { start: number; stop: number } | undefined {
    return this.#window && this.#window.stop <= (this.#subject.pass?.tokens.length ?? 0) ? this.#window : undefined;
  }

  set window(to: { start: number; stop: number } | undefined) {
    this.#window = to;
  }

  /** How many tokens of a long text are drawn, while that is not all of them. */
  get progress(): { done: number; of: number; isStopped: boolean } | undefined {
    const { pass } = this.#subject;
    if (!pass || pass.tokens.length <= MOST_TOKENS || this.#isReady(pass) || this.#far.error) return undefined;
    const far = this.#part?.pass === pass ? this.#part.far : undefined;
    return { done: far ? tokenOf(far, far.columns - 1) + 1 : 0, of: pass.tokens.length, isStopped: this.#isStopped };
  }

  /** No further piece of a long text is asked for; the one that is under way ends, here and in the server. */
  stop(): void {
    this.#isStopped = true;
    this.#asking?.abort();
  }

  /** The others are; what is there is not asked for again. */
  goOn(): void {
    this.#isStopped = false;
    this.#far.retry();
  }

  /** Whether the picture has all of a pass, or will at once. */
  #isReady(pass: PassView): boolean {
    const found = this.#far.value;
    return pass.tokens.length <= MOST_TOKENS || (found?.pass === pass && !found.isPart);
  }

  /** What is waited for, or was refused. */
  get asked(): Resource<unknown> {
    return this.#far;
  }

  /** Whether what is drawn is of an earlier text, or of another adapter; of its beginning it may be while a token is on its way. */
  readonly isStale: boolean = $derived.by(() => {
    const { pass } = this.#subject;
    return !!this.data && (this.#drawn?.adapter !== pass?.adapter || !this.data.tokens.every((token, i) => token.id === pass?.tokens[i]?.id));
  });

  readonly data: Data | undefined = $derived.by(() => {
    const { model, pass, going } = this.#subject;
    const found = this.#far.value;
    if (!model?.shape || !pass) return this.#before;
    const part = this.#part?.pass.id === pass.id ? this.#part.far : undefined;
    const shown = found && found.pass.id === pass.id ? found.far : part;
    if (!shown && this.#before?.far && pass.tokens.length <= MOST_TOKENS) return this.#before;
    this.#drawn = pass;
    const { N, K, H, D, F, V, L } = model.shape;
    return (this.#before = {
      extent: { tokens: pass.tokens.length, layers: L },
      shape: { N, K, H, D, F, V },
      tokens: pass.tokens,
      chosen: { pos: Math.min(going.pos, pass.tokens.length - 1), layer: going.layer, head: going.head },
      far: shown,
      said: this.#said?.of === shown ? this.#said?.said : undefined,
      next: this.#next.value?.pass.id === pass.id ? this.#next.value.next : undefined,
    });
  });

  async #askFar(pass: PassView, layers: number): Promise<Found> {
    this.#asking?.abort();
    const { signal } = (this.#asking = new AbortController());
    const tokens = pass.tokens.length;
    const window: Window = this.window ? { ...this.window, block: 1 } : whole(tokens);
    const shape = this.#subject.model?.shape;
    if (window.isMean && shape && !pass.experiment && pass.runner.startsWith("C ")) return await this.#askPieces(pass, window, shape, signal);
    const numbers = await api.of(pass, "picture", { start: window.start, stop: window.stop, stride: window.block, ...(window.isMean && { blocks: true }) });
    return { pass, far: readFar(numbers.values, window, layers) };
  }

  /** Ask for the picture of longer and longer beginnings: each continues the pass before (`inspect/trace.py`). */
  async #askPieces(pass: PassView, window: Window, shape: ModelView["shape"], signal: AbortSignal): Promise<Found> {
    const parts: Far[] = [];
    const tokens = pass.tokens.length;
    untrack(() => (this.#isStopped = false));
    const come = (): Far | undefined => (parts.length ? joined(parts) : undefined);
    try {
      for (const piece of piecesOf(window, shape.L, shape)) {
        const ids = pass.tokens.slice(0, piece.stop).map(({ id }) => id) as [number, ...number[]];
        const beginning = piece.stop === tokens ? pass : await api.pass({ ids, adapter: pass.adapter });
        const { start, stop, block: stride } = piece;
        const { values } = await api.of(beginning, "picture", { start, stop, stride, blocks: true }, signal);
        parts.push(readFar(values, piece, shape.L));
        if (signal.aborted) break;
        this.#part = { pass, far: come() };
      }
    } catch (error) {
      if (!signal.aborted) throw error;
    }
    return { pass, far: come(), isPart: signal.aborted };
  }

  async #askNext(pass: PassView): Promise<{ pass: PassView; next: Data["next"] }> {
    const { candidates } = await api.of(pass, "next", { position: pass.tokens.length - 1, k: CANDIDATES });
    return { pass, next: { candidates: candidates.map(({ token_id: id, text, probability }) => ({ id, text, probability })) } };
  }

  /** Read the lens some tokens at a time, those at the end first; another pass, or another window, ends it. */
  #readLens(pass: PassView, far: Far): () => void {
    let isWanted = true;
    const known = untrack(() => this.#ofBeginning(pass, far));
    const read = async (): Promise<void> => {
      let said = known?.said;
      for (let stop = far.columns; stop > (known?.columns ?? 0); stop -= AT_ONCE) {
        const first = Math.max(known?.columns ?? 0, stop - AT_ONCE);
        const lens = await api.of(pass, "lens/grid", { after: "mlp", start: tokenOf(far, first), stop: tokenOf(far, stop - 1) + 1, stride: far.block });
        if (!isWanted) return;
        said = withLens(said, far, lens);
        this.#said = { pass, of: far, said };
      }
    };
    if (known) this.#said = { pass, of: far, said: known.said };
    this.isReading = true;
    const end = (): void => {
      if (isWanted) this.isReading = false;
    };
    read().then(end, end); // what has not come is not drawn; the stages that need it say why
    return () => (isWanted = this.isReading = false);
  }

  /** What the lens has read of a text that this one begins with: later tokens change nothing of it. */
  #ofBeginning(pass: PassView, far: Far): { said: Said; columns: number } | undefined {
    const before = this.#said;
    if (!before || before.of.start !== far.start || far.start !== 0 || far.block !== 1 || before.pass.adapter !== pass.adapter) return undefined;
    const columns = before.of.columns;
    const isBeginning = columns <= far.columns && before.pass.tokens.every((token, i) => token.id === pass.tokens[i]?.id);
    if (!isBeginning || before.said.probabilities.some(Number.isNaN)) return undefined;
    return { said: widened(before.said, before.of.layers, columns, far.columns), columns };
  }
}
