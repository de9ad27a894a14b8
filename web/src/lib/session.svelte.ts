/** What the page shows: a text, its pass, and the stage, layer, head and token that are looked at. One for the page. */

import { roomOf } from "../rooms";
import type { ModelView, PassView } from "../schema";
import { api, expectAnother, heard, key, Refusal } from "./api";
import { isSame, OPENING, requestOf, textOf, type Asked } from "./asked";
import { LAST, readLink, writeLink, type How, type View } from "./link";
import { forget, renew } from "./resource.svelte";
import { Selection } from "./selection.svelte";
import { Tabs } from "./tabs";
import { textsFor } from "./texts";
import type { Trouble } from "./trouble";

const HEALTH_MS = 400;
const GONE_MS = 2000; // between two looks for a server that has gone
const TABS_MS = 250; // in which another tab tells its key
const REPLACED_MS = 2000; // a server that is replaced more often is several
const KEPT = new Set(["details", "unfolded"]); // fields that hold through the views
const AHEAD = 32; // tokens of a text whose whole pass is run before a stage requests it

/** What is to be looked at with a text, once its pass is there. */
interface Along {
  /** The token; the last where left out. */
  pos?: (pass: PassView) => number;
  /** The view's further inputs. */
  fields?: Readonly<Record<string, string>>;
}

class Session extends Selection {
  stage = $state("first");
  /** The token that is asked about, by its id; undefined is the most probable one. */
  token = $state<number | undefined>();
  /** Further inputs of the open view; another view begins with none. */
  fields = $state.raw<Readonly<Record<string, string>>>({});
  /** What stands in the line of text. */
  draft = $state(OPENING.text);
  /** What was asked for last; what is shown may still be, or stay, of an earlier question. */
  wanted = $state.raw<Asked>(OPENING);
  model = $state.raw<ModelView | undefined>();
  trouble = $state.raw<Trouble | undefined>();
  /** Whether what is shown is about to be something else. */
  busy = $state(false);
  /** A pass, and what it was asked for by: they change together. */
  #shown = $state.raw<{ asked: Asked; pass: PassView } | undefined>();
  #turn = 0;
  #isWaiting = false;
  #replaced = -Infinity;
  #greeted = "";
  #hasHead = $state(false);
  #tabs: Tabs | undefined;
  /** Keys that were refused: another tab may have one of them, too. */
  readonly #wrong = new Set<string>();
  /** Whether the server takes no key of this tab. */
  #isKeyless = false;
  /** The key that the other tabs know of. */
  #told = "";
  #timer: ReturnType<typeof setTimeout> | undefined;
  #unanswered: ReturnType<typeof setTimeout> | undefined; // no other tab told a key in time

  constructor() {
    super();
    heard.refused = (refusal) => this.fail(refusal);
    heard.replaced = () => this.#replace();
  }

  get pass(): PassView | undefined {
    return this.#shown?.pass;
  }

  /** What the pass that is shown was asked for by; what it will be, before there is one. */
  get asked(): Asked {
    return this.#shown?.asked ?? this.wanted;
  }

  get text(): string {
    return this.asked.text;
  }

  get bos(): boolean {
    return this.asked.bos;
  }

  get ids(): readonly number[] | undefined {
    return this.asked.ids;
  }

  get answer(): string {
    return this.asked.answer;
  }

  /** Where the answer begins: behind the text. */
  get answerAt(): number {
    return (this.pass?.tokens.length ?? 0) - this.answer.length;
  }

  get adapter(): string | undefined {
    return this.asked.adapter;
  }

  /** Whether neither a link nor the reader has chosen a layer or a head. */
  get isFree(): boolean {
    return !this.#hasHead && this.layer === 0 && this.head === 0;
  }

  /** A layer and a head are chosen, if only by leaving them as they are. */
  choose({ layer, head }: { layer: number; head: number } = this): void {
    this.#hasHead = true;
    [this.layer, this.head] = [layer, head];
  }

  get view(): View {
    const { stage, layer, head, pos, token, text, bos, ids, answer, adapter, fields } = this;
    const chosen = this.isFree ? { layer: LAST, head: LAST } : { layer, head };
    return { stage, ...chosen, pos, token, text, bos, ids, answer, adapter, fields };
  }

  /** Open a view, by what links call it; details that are open stay open, and layers unfolded. */
  open(stage: string, fields: Readonly<Record<string, string>> = {}): void {
    const kept = Object.entries(this.fields).filter(([name]) => KEPT.has(name));
    this.stage = stage;
    this.fields = { ...Object.fromEntries(kept), ...fields };
  }

  /** A link to what is shown, without the key. */
  get link(): string {
    return `${location.origin}${location.pathname}${writeLink(this.view)}`;
  }

  /** Take what a fragment names; the key moves into this tab's storage, out of the address. A ticket is returned. */
  take(hash: string): string | undefined {
    const { view, key: given, ticket } = readLink(hash);
    if (given !== undefined) key.set(given);
    const { text = this.wanted.text, bos = view.text === undefined ? this.wanted.bos : true, ids, answer = "", adapter, ...where } = view;
    this.draft = text;
    this.stay();
    this.#ask({ text, bos, ids, answer, adapter });
    this.#hasHead ||= where.layer !== undefined || where.head !== undefined;
    Object.assign(this, { token: undefined }, where);
    this.#fit();
    const link = writeLink(this.view);
    if (link !== location.hash) history.replaceState(null, "", link); // while it goes back, a browser may drop a further step for it
    return ticket;
  }

  /** Want what a link names; where that is not what is shown, nothing is: places in one text are none in another. */
  #ask(asked: Asked): void {
    const before = this.asked;
    this.wanted = isSame(asked, before) ? before : asked;
    if (this.wanted === before) return;
    this.#shown = undefined;
    this.pos = LAST;
  }

  /** Follow a link of this page, or the way back. */
  follow(hash: string): void {
    this.take(hash);
    if (!this.pass || this.trouble) void this.run();
  }

  /** Keep what is looked at within the model and the pass that are there: a link may have been written beside larger ones. */
  #fit(): void {
    const { model, pass } = this;
    if (pass) this.pos = Math.min(this.pos, pass.tokens.length - 1);
    if (!model) return;
    this.layer = Math.min(this.layer, model.shape.L - 1);
    this.head = Math.min(this.head, model.shape.N - 1);
    if (this.token !== undefined && this.token >= model.shape.V) this.token = undefined;
  }

  async start(): Promise<void> {
    const ticket = this.take(location.hash);
    this.#tabs = new Tabs({
      mine: () => (this.model && !this.trouble ? key.get() || undefined : undefined),
      told: (other) => this.#try(other),
    });
    if (ticket === undefined || (await this.#enter(ticket))) await this.run();
  }

  /** The page is left: nothing is looked for, and no tab is heard. */
  stop(): void {
    clearTimeout(this.#timer);
    clearTimeout(this.#unanswered);
    this.trouble = undefined;
    this.#tabs?.close();
    this.#tabs = undefined;
  }

  /** Exchange a ticket for the key; tell whether it was taken. */
  async #enter(ticket: string): Promise<boolean> {
    try {
      key.set((await api.enter({ ticket })).key);
      return true;
    } catch (error) {
      this.fail(error);
      return false;
    }
  }

  /** Ask for what stands in the line of text. */
  submit(): Promise<void> {
    this.wanted = { ...this.wanted, text: this.draft, ids: undefined, answer: "" };
    return this.run({});
  }

  /** Put a text into the line, and ask for it. */
  attempt(text: string, along: Along = {}): Promise<void> {
    this.draft = text;
    this.wanted = { ...this.wanted, text, ids: undefined, answer: "" };
    this.token = undefined;
    return this.run(along);
  }

  /** Put tokens behind what is looked at, which is named by its ids from then on: no text need give just these tokens. */
  append(more: readonly { id: number; text: string }[], how: How): Promise<void> {
    const tokens = [...(this.pass?.tokens ?? []), ...more];
    return this.#answer(tokens, this.asked.text + textOf(more), this.answer + how.repeat(more.length));
  }

  /** Let so many tokens of the answer stay. */
  cut(count: number): Promise<void> {
    const tokens = this.pass?.tokens ?? [];
    const { answerAt: start } = this;
    const text = this.asked.text.slice(0, this.asked.text.length - textOf(tokens.slice(start + count)).length);
    return this.#answer(tokens.slice(0, start + count), text, this.answer.slice(0, count));
  }

  #answer(tokens: readonly { id: number }[], text: string, answer: string): Promise<void> {
    if (!this.pass) return Promise.resolve();
    if (this.draft === this.asked.text) this.draft = text;
    this.wanted = { ...this.asked, text, ids: tokens.map(({ id }) => id), answer };
    return this.run({ fields: this.fields });
  }

  /** Ask for the same with something otherwise. */
  want(changed: Partial<Pick<Asked, "bos" | "adapter">>): Promise<void> {
    this.wanted = { ...this.wanted, ...changed };
    return this.run();
  }

  /** Ask for the model, and for the pass where the open room looks at one; what is looked at moves when that is there. */
  async run(along?: Along): Promise<void> {
    const turn = ++this.#turn;
    const { stage } = this;
    let { wanted } = this;
    this.busy = true;
    try {
      const model = await api.get("model");
      if (turn !== this.#turn) return;
      this.model = model;
      if (wanted === OPENING) wanted = this.#begin(textsFor(model.shape.V)[0]);
      const pass = roomOf(stage).hasText ? await api.passAnew(requestOf(wanted)) : undefined;
      if (turn !== this.#turn) return;
      if (pass) this.#show(wanted, pass, stage === this.stage ? along : along && { ...along, fields: this.fields });
      this.#fit();
      if (this.trouble) renew();
      this.trouble = undefined;
      this.#tell();
    } catch (error) {
      if (turn === this.#turn) this.fail(error);
    } finally {
      if (turn === this.#turn) this.busy = false;
    }
  }

  /** Begin with this text, unless another one is being typed. */
  #begin(text: string): Asked {
    if (this.draft === OPENING.text) this.draft = text;
    return (this.wanted = { ...OPENING, text });
  }

  #show(asked: Asked, pass: PassView, along: Along | undefined): void {
    this.#shown = { asked, pass };
    this.stay();
    if (along) {
      this.pos = along.pos?.(pass) ?? pass.tokens.length - 1;
      this.fields = along.fields ?? this.fields;
    }
    if (pass.tokens.length <= AHEAD && !roomOf(this.stage).isPlain) void api.activation(pass, "embed", { position: 0 }).catch(() => undefined);
  }

  /** Another process answers at the same address, perhaps with another model: nothing that is shown is known to be its. */
  #replace(): void {
    const now = performance.now();
    const isAgain = now - this.#replaced < REPLACED_MS;
    this.#replaced = now;
    this.#forget();
    if (!isAgain) void this.run();
    else this.fail(new Refusal(0, "several servers answer at this address in turns; the page needs the same one each time", "replaced"));
  }

  /** Ask another model, which the page itself has opened, about the text: its tokens are others there. */
  switchModel(): Promise<void> {
    expectAnother();
    if (this.wanted !== OPENING) this.wanted = { ...this.wanted, text: this.text, ids: undefined, answer: "", adapter: undefined };
    this.token = undefined;
    this.#forget();
    return this.run({});
  }

  /** What is shown is of another model. */
  #forget(): void {
    this.#shown = undefined;
    this.model = undefined;
    forget();
  }

  /** Show why something was refused; while the model loads, ask again by itself. */
  fail(error: unknown): void {
    if (!(error instanceof Refusal)) {
      this.trouble = { kind: "refused", message: `the page failed: ${String(error)}`, retry: true };
    } else if (error.code === "loading") void this.#wait();
    else if (error.status === 401) this.#askTabs();
    else if (error.status === 0) this.#lose(error);
    else this.trouble = { kind: "refused", message: error.message, retry: error.status === 429 || error.status >= 500 };
  }

  /** Ask the other tabs for a key before the reader is asked. */
  #askTabs(): void {
    const refused = key.get();
    const trouble = { kind: "key", isWrong: refused !== "" } as const;
    const isAsked = this.#isKeyless && this.#wrong.has(refused);
    this.#isKeyless = true;
    this.#wrong.add(refused);
    if (isAsked || !this.#tabs) {
      if (!this.#isAsking()) this.trouble = trouble;
      return;
    }
    this.trouble = { kind: "tabs" };
    this.#tabs.ask();
    this.#unanswered = setTimeout(() => {
      if (this.#isAsking() && key.get() === refused) this.trouble = trouble;
    }, TABS_MS);
  }

  #isAsking(): boolean {
    return this.trouble?.kind === "tabs";
  }

  /** A key of another tab: taken where this one has none that the server takes. */
  #try(other: string): void {
    if (!this.#isKeyless || this.#wrong.has(other)) return;
    key.set(other);
    void this.run();
  }

  /** Other tabs may wait for a key, as after the server was started again. */
  #tell(): void {
    this.#isKeyless = false;
    const mine = key.get();
    this.#wrong.delete(mine);
    if (mine !== "" && mine !== this.#told) this.#tabs?.tell(mine);
    this.#told = mine;
  }

  /** The server is gone: look for it until it is there again, while the page is seen. */
  #lose({ message }: Refusal): void {
    this.trouble = { kind: "gone", message };
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => void this.#look(), GONE_MS);
  }

  async #look(): Promise<void> {
    if (this.trouble?.kind !== "gone") return;
    const isThere = !document.hidden && (await api.health().then(() => true, () => false));
    if (this.trouble?.kind !== "gone") return;
    if (isThere) void this.run();
    else this.#timer = setTimeout(() => void this.#look(), GONE_MS);
  }

  async #wait(): Promise<void> {
    if (this.#isWaiting) return;
    this.#isWaiting = true;
    try {
      for (;;) {
        const { status, progress } = await api.health();
        if (status !== "loading") break;
        this.trouble = { kind: "loading", progress: progress ?? 0 };
        await new Promise((done) => setTimeout(done, HEALTH_MS));
        if (!this.#tabs) return; // the page was left meanwhile
      }
    } catch (error) {
      this.fail(error);
      return;
    } finally {
      this.#isWaiting = false;
    }
    await this.run();
  }

  /** A view's title is there: it takes the focus, unless the page begins with it. */
  greet = (title: HTMLElement): void => {
    const { stage } = this;
    const isInPicture = document.activeElement?.closest(".picture"); // who enters a place by keys goes on by keys
    if (this.#greeted !== "" && this.#greeted !== stage && !isInPicture) title.focus();
    this.#greeted = stage;
  };
}

export const session = new Session();
