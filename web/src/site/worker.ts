/** The engine in a worker: opens one model, and answers one question after the other. */
import { EngineError, openModel } from "../engine";
import { threadsFor } from "../engine/threads";
import type { Thread, Threading } from "../engine/types";
import type { PassView } from "../schema";
import { Refused, type Answer, type Events } from "./asked";
import type { Rendering, Written } from "./chat/jinja";
import { ChatTemplate, templateOf } from "./chat/template";
import type { Ask, FromWorker, Leave, Open, Opening } from "./messages";
import { Passes } from "./passes";
import { answer, type Opened } from "./routes";

type State =
  | { readonly kind: "loading"; readonly progress: number }
  | { readonly kind: "open"; readonly opened: Opened }
  | { readonly kind: "failed"; readonly error: unknown };

type Reply = Pick<FromWorker, "status" | "headers" | "body">;

const JSON_TYPE = { "content-type": "application/json" };

let state: State = { kind: "loading", progress: 0 };
/** What is open, or to be. */
let wanted: Open | undefined;
/** A question waits so long for the model: a small one is there by then, and of others the page shows the progress. */
const PATIENCE_MS = 1000;
let endOpening = (): void => undefined;
let openingHasEnded = new Promise<void>((done) => (endOpening = done));
/** Questions that wait; each is answered in a turn of its own, so that those that were left meanwhile are not. */
const waiting = new Map<number, Ask>();

const port = self as unknown as { postMessage: (reply: FromWorker | Opening, transfer: Transferable[]) => void };

self.addEventListener("message", ({ data }: MessageEvent<Open | Ask | Leave>) => {
  if (data.kind === "open") void open(data);
  else if (data.kind === "leave") waiting.delete(data.id);
  else {
    waiting.set(data.id, data);
    void ready(data).then(turn).then(() => take(data.id));
  }
});

async function ready({ path }: Ask): Promise<void> {
  if (path === "/inspect/model" && state.kind === "failed" && wanted && mayPass(state.error)) {
    openingHasEnded = new Promise<void>((done) => (endOpening = done));
    void open(wanted);
  }
  if (state.kind !== "loading" || path === "/health") return;
  await Promise.race([openingHasEnded, new Promise((done) => setTimeout(done, PATIENCE_MS))]);
}

/** Whether another attempt may succeed: whoever asks for the model again, makes one. */
const mayPass = (error: unknown): boolean => STATUS[(error as { code?: string }).code ?? ""] === 503;

/** The other threads: workers of this one. */
function threading({ sharedKernels, threads }: Open): Threading {
  const count = threadsFor({ isIsolated: self.crossOriginIsolated, processors: navigator.hardwareConcurrency, wanted: threads });
  return { kernels: new URL(sharedKernels), count, newThread };
}

function newThread(): Thread {
  const worker = new Worker(new URL(/* @vite-ignore */ "./thread.js", import.meta.url), { type: "module" });
  return {
    start: (given) => new Promise((ready, fail) => {
      worker.addEventListener("message", () => ready(), { once: true });
      worker.addEventListener("error", ({ message }) => fail(new Error(message || "its script cannot be loaded")), { once: true });
      worker.postMessage(given);
    }),
    end: () => worker.terminate(),
  };
}

const TEMPLATE_MS = 5000; // of a template; published ones take some milliseconds

/** Render a chat template, which may be anybody's, in a worker that is ended. */
async function render(rendering: Rendering): Promise<readonly Written[]> {
  const worker = new Worker(new URL(/* @vite-ignore */ "./template.js", import.meta.url), { type: "module" });
  const ended = (error: string): Written[] => rendering.variables.map(() => ({ error }));
  let timer: ReturnType<typeof setTimeout> | undefined;
  try {
    return await new Promise<readonly Written[]>((take) => {
      worker.addEventListener("message", ({ data }: MessageEvent<Written[]>) => take(data));
      worker.addEventListener("error", ({ message }) => take(ended(message || "its worker cannot be loaded")));
      timer = setTimeout(() => take(ended(`it was stopped after ${TEMPLATE_MS / 1000} s`)), TEMPLATE_MS);
      worker.postMessage(rendering);
    });
  } finally {
    clearTimeout(timer);
    worker.terminate();
  }
}

async function open(told: Open): Promise<void> {
  const { name, command, file, kernels, lesson, instance, first } = (wanted = told);
  const say = (now: Opening["state"], progress = 1, message = "", isFinal = false): void => {
    port.postMessage({ kind: "opening", name, state: now, progress, message, isFinal }, []);
  };
  let shown = -1;
  const onProgress = ({ done, total }: { done: number; total: number }): void => {
    const progress = total ? done / total : 0;
    if (Math.floor(100 * progress) === shown) return;
    shown = Math.floor(100 * progress);
    state = { kind: "loading", progress };
    say("loading", progress);
  };
  onProgress({ done: 0, total: 1 });
  try {
    const source = typeof file === "string" ? new URL(file) : file;
    const model = await openModel(source, new URL(kernels), { onProgress, name, threading: threading(told) });
    const template = templateOf(model);
    const chat = template === null ? null : new ChatTemplate(model, template, render);
    const opened = { passes: new Passes(model, instance), command, chat, lesson };
    if (first !== null) {
      say("computing");
      computeFirst(opened, first);
    }
    state = { kind: "open", opened };
    say("open");
  } catch (error) {
    state = { kind: "failed", error };
    say("failed", 1, (error as Error).message, (error as { code?: string }).code === "no-simd");
  }
  endOpening();
}

/** Run the text that the page looks at, so that this model answers at once when it takes the place of another one. */
function computeFirst(opened: Opened, body: unknown): void {
  try {
    const { json } = answer(opened, { method: "POST", path: "/inspect/passes", body }) as { json: PassView };
    const { ids } = opened.passes.find(json.id);
    opened.passes.fill(ids, ids.length);
  } catch (error) {
    if (error instanceof Refused || (error instanceof EngineError && error.code === "input")) return; // the page says why when it asks
    throw error;
  }
}

function take(id: number): void {
  const asked = waiting.get(id);
  if (!asked) return;
  try {
    const told = answered(asked);
    if ("events" in told) return void stream(id, told);
    post(id, replied(told));
  } catch (error) {
    post(id, refused(error));
  }
  waiting.delete(id);
}

function post(id: number, reply: Reply, goesOn = false): void {
  port.postMessage({ id, goesOn, ...reply }, typeof reply.body === "string" ? [] : [reply.body]);
}

/** Send events as they are computed, with a turn between two of them in which whoever asked may leave. Before the first one it may be refused. */
async function stream(id: number, { events, last }: Events): Promise<void> {
  let isBegun = false;
  const send = (data: string, goesOn: boolean): void => {
    post(id, { status: 200, headers: isBegun ? {} : { "content-type": "text/event-stream" }, body: `data: ${data}\n\n` }, goesOn);
    isBegun = true;
  };
  try {
    for (; waiting.has(id); await turn()) {
      const { done, value } = await events.next();
      if (!waiting.has(id)) break;
      if (value !== null && !done) send(JSON.stringify(value), true);
      if (!done) continue;
      send(last, false);
      waiting.delete(id);
    }
  } catch (error) {
    const reply = refused(error);
    if (isBegun) send(JSON.stringify({ type: "error", ...(JSON.parse(reply.body as string) as object) }), false);
    else post(id, reply);
    waiting.delete(id);
  }
}

const channel = new MessageChannel();
const turns: (() => void)[] = [];
channel.port1.addEventListener("message", () => turns.shift()?.());
channel.port1.start();

/** Let other messages come in first. Timers would wait for 4 ms, and for a second in a tab that is not seen. */
function turn(): Promise<void> {
  return new Promise((go) => {
    turns.push(go);
    channel.port2.postMessage(null);
  });
}

function answered(asked: Ask): Answer {
  if (asked.path === "/health" && state.kind === "loading") return { json: { status: "loading", progress: state.progress } };
  if (state.kind === "open") return answer(state.opened, asked);
  if (state.kind === "failed") throw state.error;
  throw new Refused(503, "the model is being loaded", "loading");
}

function replied(told: Exclude<Answer, { events: unknown }>): Reply {
  if ("json" in told) return { status: 200, headers: JSON_TYPE, body: JSON.stringify(told.json) };
  const { values, shape, axes } = told.numbers;
  const headers = { "x-dtype": "float32", "x-shape": shape.join(), "x-axes": axes, "x-stride": String(told.stride ?? 1) };
  return { status: 200, headers, body: values.slice().buffer }; // a copy travels: what is kept stays here
}

/** Of the engine's errors, those that another text or another attempt may mend; all others are the file's or the browser's. */
const STATUS: Readonly<Record<string, number>> = { input: 400, network: 503, "no-memory": 503 };

function refused(error: unknown): Reply {
  const { message, code = null } = error as { message?: string; code?: string | null };
  const status = error instanceof Refused ? error.status : (STATUS[code ?? ""] ?? 422);
  const param = error instanceof Refused ? error.param : null;
  return { status, headers: JSON_TYPE, body: JSON.stringify({ error: { message: message ?? String(error), code, param } }) };
}
