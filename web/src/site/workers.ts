/**
 * The workers behind a page: one that answers, and one that opens a further model beside it. Each has one model and ends with it, so an
 * opening can be cancelled at any moment, whatever is being computed, and the model before goes on answering meanwhile.
 */
import type { Answers, Port } from "./answers";
import type { Open, Opening } from "./messages";

/** What the page uses of a `Worker`. */
export interface EngineWorker extends Omit<Port, "postMessage"> {
  postMessage(message: Open | Parameters<Port["postMessage"]>[0]): void;
  addEventListener(type: "message" | "error", take: (event: { data?: unknown; message?: string }) => void): void;
  terminate(): void;
}

/** A model to open. */
export type Wanted = Omit<Open, "kind" | "instance" | "first">;

export class Workers {
  #answering: EngineWorker;
  /** The model that is open in it; empty: none. */
  #open = "";
  /** What is being opened, and where: for the first model, in the worker that answers. */
  #opening: { readonly name: string; readonly worker: EngineWorker } | undefined;
  #count = 0;

  /** The first worker starts at once, while the page still looks for what to open in it. */
  constructor(
    private readonly answers: Answers,
    private readonly start: () => EngineWorker,
    private readonly told: (opening: Opening, open: string) => void,
  ) {
    this.#answering = this.#started();
    answers.use(this.#answering);
  }

  #started(): EngineWorker {
    const worker = this.start();
    worker.addEventListener("message", ({ data }) => {
      if ((data as Partial<Opening>).kind === "opening") this.#hear(worker, data as Opening);
    });
    worker.addEventListener("error", ({ message }) => {
      this.#lose(worker, message ? `the engine has stopped: ${message}` : "the engine cannot be loaded, or has stopped");
    });
    return worker;
  }

  /** Open a model. One that is open answers until this one can, and stays if this one fails. */
  open(wanted: Wanted): void {
    const { answers } = this;
    const isFirst = this.#count++ === 0;
    if (this.#opening) this.#opening.worker.terminate();
    const worker = isFirst ? this.#answering : this.#started();
    this.#opening = { name: wanted.name, worker };
    if (!this.#open && !isFirst) this.#replace(worker);
    worker.postMessage({ ...wanted, kind: "open", instance: this.#count, first: answers.text });
  }

  /** Stop the opening that is under way. */
  cancel(): void {
    if (this.#opening) this.#lose(this.#opening.worker, `${this.#opening.name}: opening was cancelled`);
  }

  #hear(worker: EngineWorker, opening: Opening): void {
    const { state, name } = opening;
    if (worker !== this.#answering && worker !== this.#opening?.worker) return;
    if (state === "loading") this.#opening = { name, worker }; // also where it is tried again after a failure
    else if (state !== "computing") this.#opening = undefined;
    if (state === "open") {
      if (worker !== this.#answering) this.#replace(worker);
      this.#open = name;
    }
    if (state === "failed" && worker !== this.#answering) worker.terminate();
    this.told(opening, this.#open);
  }

  #replace(worker: EngineWorker): void {
    this.#answering.terminate();
    this.#answering = worker;
    this.answers.use(worker);
  }

  /** A worker has stopped, or is stopped. */
  #lose(worker: EngineWorker, message: string): void {
    const opening = this.#opening;
    const isOpening = opening?.worker === worker;
    const name = isOpening ? opening.name : this.#open;
    worker.terminate();
    if (isOpening) this.#opening = undefined;
    if (worker === this.#answering) {
      this.#open = "";
      this.answers.fail(isOpening ? message : `${message}; reload the page`);
    }
    this.told({ kind: "opening", name, state: "failed", progress: 1, message, isFinal: false }, this.#open);
  }
}
