/** Several threads in Node.js, as site/worker.ts has them in a browser. */
import { readFileSync } from "node:fs";
import { Worker } from "node:worker_threads";
import type { Thread, Threading } from "../../src/engine/types.ts";

/** `kernels` and `script` are paths: of the kernels for several threads, and of thread.ts as one file. */
export function nodeThreads(kernels: string, script: string, count: number): Threading {
  return { kernels: new WebAssembly.Module(readFileSync(kernels)), count, newThread: () => newThread(script) };
}

function newThread(script: string): Thread {
  const worker = new Worker(script);
  return {
    start: (given) => new Promise((ready, fail) => {
      worker.once("message", () => ready());
      worker.once("error", fail);
      worker.postMessage(given);
    }),
    end: () => void worker.terminate(),
  };
}
