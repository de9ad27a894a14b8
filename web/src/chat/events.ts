/** A streamed answer of the server's own completions: its events as they come, and how it breaks. */

import { Refusal } from "../lib/api";
import { batches, parsed } from "../lib/events";
import type { Chunk } from "./turns";

const DONE = "[DONE]";

/** What each reading of the network brings; throws `Refusal` where the server refuses, or the stream breaks. */
export async function* stream(path: string, body: unknown, signal: AbortSignal): AsyncGenerator<Chunk[]> {
  for await (const told of batches(path, body, signal)) {
    const good: Chunk[] = [];
    try {
      for (const data of told) if (data !== DONE) good.push(chunk(data));
    } finally {
      if (good.length) yield good; // what came before a failure, too
    }
    if (told.includes(DONE)) return;
  }
  throw new Refusal(0, "the stream ended before the answer did", "broken");
}

function chunk(data: string): Chunk {
  const told = parsed<Chunk | { error: { message: string; code?: string | null } }>(data);
  if ("error" in told) throw new Refusal(0, told.error.message, told.error.code ?? "broken");
  return told;
}
