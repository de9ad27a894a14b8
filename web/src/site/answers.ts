/** The page's side of the workers: questions by their numbers, and their answers as those of `fetch`. */
import type { Ask, FromWorker, Leave } from "./messages";

/** What a worker is for the page; a test gives another one. */
export interface Port {
  postMessage(message: Ask | Leave): void;
  addEventListener(type: "message", take: (event: { data?: unknown }) => void): void;
}

interface Waiting {
  readonly ask: Ask;
  readonly take: (answer: Response) => void;
}

export class Answers {
  readonly #waiting = new Map<number, Waiting>();
  /** Bodies that come in parts. */
  readonly #bodies = new Map<number, ReadableStreamDefaultController<Uint8Array>>();
  #count = 0;
  #worker: Port | undefined;
  /** How many workers have been asked: an answer tells the page which model it is of. */
  #instance = 0;
  /** Why nothing is answered, while it is so. */
  #failure: string | undefined;
  /** The last text that the page looked at: the body of its request. */
  text: unknown = null;

  /** Ask this worker from now on, also what still waits; answers of the one before that are half there break off. */
  use(worker: Port): void {
    this.#worker = worker;
    this.#instance++;
    this.#failure = undefined;
    for (const body of this.#bodies.values()) body.error(new Error("another model has been opened"));
    this.#bodies.clear();
    worker.addEventListener("message", ({ data }) => {
      if (worker === this.#worker && typeof (data as Partial<FromWorker>).id === "number") this.#take(data as FromWorker);
    });
    for (const { ask } of this.#waiting.values()) worker.postMessage(ask);
  }

  ask(path: string, { method = "GET", body, signal }: RequestInit): Promise<Response> {
    if (this.#failure !== undefined) return Promise.resolve(refusal(this.#failure));
    return new Promise((take, fail) => {
      const id = this.#count++;
      const ask: Ask = { kind: "ask", id, method, path, body: typeof body === "string" ? (JSON.parse(body) as unknown) : undefined };
      if (path === "/inspect/passes" && (ask.body as { text?: unknown } | undefined)?.text !== undefined) this.text = ask.body;
      this.#waiting.set(id, { ask, take });
      this.#worker?.postMessage(ask);
      signal?.addEventListener("abort", () => {
        this.#leave(id);
        this.#bodies.get(id)?.error(signal.reason);
        this.#bodies.delete(id);
        fail(signal.reason as Error);
      });
    });
  }

  #leave(id: number): void {
    this.#worker?.postMessage({ kind: "leave", id });
    this.#waiting.delete(id);
  }

  #take({ id, status, headers, body, goesOn }: FromWorker): void {
    const waiting = this.#waiting.get(id);
    if (waiting) {
      const whole = goesOn ? this.#opened(id) : body;
      waiting.take(new Response(whole, { status, headers: { ...headers, "x-llamarium-instance": String(this.#instance) } }));
      this.#waiting.delete(id);
    }
    const open = this.#bodies.get(id);
    if (typeof body === "string" && body) open?.enqueue(new TextEncoder().encode(body));
    if (goesOn) return;
    open?.close();
    this.#bodies.delete(id);
  }

  /** A body whose parts come with further messages; whoever cancels it does not wait for them. */
  #opened(id: number): ReadableStream<Uint8Array> {
    return new ReadableStream({
      start: (control) => void this.#bodies.set(id, control),
      cancel: () => {
        this.#leave(id);
        this.#bodies.delete(id);
      },
    });
  }

  /** Refuse what still waits, and what is asked until there is another worker. */
  fail(message: string): void {
    this.#failure = message;
    this.#worker = undefined;
    for (const { take } of this.#waiting.values()) take(refusal(message));
    for (const body of this.#bodies.values()) body.error(new Error(message));
    this.#waiting.clear();
    this.#bodies.clear();
  }
}

function refusal(message: string): Response {
  return Response.json({ error: { message, code: "engine_stopped", param: null } }, { status: 422 });
}
