import type { Ask, FromWorker, Leave, Open, Opening } from "../src/site/messages";
import type { EngineWorker } from "../src/site/workers";

type Take = Parameters<EngineWorker["addEventListener"]>[1];

/** A worker that keeps what it is sent, and says what a test wants. */
export class FakeWorker implements EngineWorker {
  readonly sent: (Ask | Leave | Open)[] = [];
  isEnded = false;
  readonly #takes: [type: string, take: Take][] = [];

  postMessage(message: Ask | Leave | Open): void {
    this.sent.push(message);
  }

  addEventListener(type: string, take: Take): void {
    this.#takes.push([type, take]);
  }

  terminate(): void {
    this.isEnded = true;
  }

  say(answer: Partial<FromWorker>): void {
    this.#tell("message", { data: { status: 200, headers: {}, body: "{}", goesOn: false, ...answer } });
  }

  tell(opening: Partial<Opening>): void {
    this.#tell("message", { data: { kind: "opening", name: "model", progress: 1, message: "", isFinal: false, ...opening } });
  }

  break(message: string): void {
    this.#tell("error", { message });
  }

  #tell(type: string, event: { data?: unknown; message?: string }): void {
    if (!this.isEnded) for (const [of, take] of this.#takes) if (of === type) take(event);
  }
}
