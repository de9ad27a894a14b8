/** A thread of the kernels in Node.js. */
import { parentPort } from "node:worker_threads";
import { runThread } from "../../src/engine/threads.ts";
import type { ThreadStart } from "../../src/engine/types.ts";

parentPort?.once("message", (given: ThreadStart) => runThread(given, () => parentPort?.postMessage("ready")));
