/** The page's side of the worker: questions by their numbers, and their answers as those of `fetch`. */
import type { Ask, FromWorker, Leave } from "./messages";

/** What a worker is for the page; a test gives another one. */
export interface Port {
  postMessage(message: Ask | Leave): void;
  addEventListener(type: "message" | "error", take: (event: { data?: unknown; message?: string }) => void): void;
}

export class Answers {
  readonly #asked = new Map<number, (answer: Response) => void>();
  /** Bodies that come in parts. */
  readonly #bodies = new Map<number, ReadableStreamDefaultController<Uint8Array>>();
  #count = 0;
  /** Why nothing more is answered, once it is so. */
  #failure: string | undefined;

  constructor(private readonly worker: Port) {
    worker.addEventListener("message", ({ data }) => {
      if (typeof (data as Partial<FromWorker>).id === "number") this.#take(data as FromWorker);
    });
    worker.addEventListener("error", ({ message }) => this.fail(`the engine has stopped (${message ?? "no reason given"}); reload the page`));
  }

  ask(path: string, { method = "GET", body, signal }: RequestInit): Promise<Response> {
    if (this.#failure !== undefined) return Promise.resolve(refusal(this.#failure));
    return new Promise((take, fail) => {
      const id = this.#count++;
      this.#asked.set(id, take);
      this.worker.postMessage({ kind: "ask", id, method, path, body: typeof body === "string" ? (JSON.parse(body) as unknown) : undefined });
      signal?.addEventListener("abort", () => {
        this.#leave(id);
        this.#bodies.get(id)?.error(signal.reason);
        this.#bodies.delete(id);
        fail(signal.reason as Error);
      });
    });
  }

  #leave(id: number): void {
    this.worker.postMessage({ kind: "leave", id });
    this.#asked.delete(id);
  }

  #take({ id, status, headers, body, goesOn, instance }: FromWorker): void {
    const take = this.#asked.get(id);
    if (take) {
      const whole = goesOn ? this.#opened(id) : body;
      take(new Response(whole, { status, headers: { ...headers, "x-llamarium-instance": instance } }));
      this.#asked.delete(id);
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

  /** Refuse what is asked from now on, and what still waits. */
  fail(message: string): void {
    this.#failure = message;
    for (const take of this.#asked.values()) take(refusal(message));
    for (const body of this.#bodies.values()) body.error(new Error(message));
    this.#asked.clear();
    this.#bodies.clear();
  }
}

function refusal(message: string): Response {
  return Response.json({ error: { message, code: "engine_stopped", param: null } }, { status: 422 });
}
