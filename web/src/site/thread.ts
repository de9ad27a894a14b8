/** A thread of the kernels: a worker of the worker that has the engine. */
import { runThread } from "../engine/threads";
import type { ThreadStart } from "../engine/types";

self.addEventListener("message", ({ data }: MessageEvent<ThreadStart>) => runThread(data, () => self.postMessage("ready")), { once: true });
