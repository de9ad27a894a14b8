/** Answers that come in events (server-sent events): each is handed on as it comes. Aborting closes it, and the server ends its work. */

import { fetched, Refusal } from "./api";

interface Failure {
  type: "error";
  error: { message: string; code: string | null; param: string | null };
}

/** Cuts what comes into the data of events; a line may come in several pieces. */
export class Events {
  #rest = "";

  push(text: string): string[] {
    const parts = (this.#rest + text).split("\n\n");
    this.#rest = parts.pop() ?? "";
    return parts.flatMap((part) => {
      const data = part.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice("data: ".length));
      return data.length ? [data.join("\n")] : [];
    });
  }
}

/**
 * Ask for a stream: the data of the events that each reading of the network brings, until it ends, is left or breaks.
 *
 * @throws Refusal if it is refused, or the connection is lost; an abort throws its own error.
 */
export async function* batches(path: string, body: unknown, signal: AbortSignal): AsyncGenerator<string[]> {
  const answer = await fetched("POST", path, body, signal);
  const reader = answer.body?.pipeThrough(new TextDecoderStream()).getReader();
  const events = new Events();
  try {
    for (;;) {
      const { done, value } = (await reader?.read()) ?? { done: true, value: undefined };
      if (done || value === undefined) return;
      const told = events.push(value);
      if (told.length) yield told;
    }
  } catch (error) {
    if (signal.aborted) throw error;
    throw new Refusal(0, "the connection to the server was lost", "broken");
  } finally {
    void reader?.cancel().catch(() => undefined);
  }
}

/** Read an event; what is none breaks the answer. */
export function parsed<T>(data: string): T {
  try {
    return JSON.parse(data) as T;
  } catch {
    throw new Refusal(0, "what came is no event of an answer", "broken");
  }
}

/**
 * Ask for a stream of the page's own, and take its events until the last one.
 *
 * @throws Refusal if it is refused, or breaks off.
 */
export async function follow<T>(path: string, body: unknown, take: (event: T) => void, signal: AbortSignal): Promise<void> {
  for await (const told of batches(path, body, signal)) {
    for (const data of told) {
      const event = parsed<{ type: string }>(data);
      if (event.type === "end") return;
      if (event.type === "error") {
        const { message, code, param } = (event as Failure).error;
        throw new Refusal(500, message, code, param);
      }
      take(event as unknown as T);
    }
  }
  throw new Refusal(0, "the answer broke off before its end; the server may have been stopped", "broken");
}
