/**
 * Several threads: workers over one shared memory. The one that runs the engine is the first; each of the others has an instance of the
 * kernels of its own and stays in their `lm_work` (native/pool_wasm.c).
 *
 * How many there are is decided in `threadsFor`; a site takes `?threads=N` from its address.
 */
import type { ThreadStart } from "./types.ts";

const USUAL_MOST = 8; // with more of them, waiting for the last one takes what they save
const MOST = 64;
const PAGES = [65535, 32768, 16384]; // of 64 KB: browsers reserve the addresses of a shared memory at once, and some have no 4 GB

interface Given {
  /** `crossOriginIsolated`: whether memory can be shared. */
  isIsolated: boolean;
  /** `navigator.hardwareConcurrency`. */
  processors: number;
  /** Asked for, whatever the processors. */
  wanted?: number | undefined;
}

/** How many threads compute: all of two processors, and half of more, since two of them often are one core, and a page needs some itself. */
export function threadsFor({ isIsolated, processors, wanted }: Given): number {
  if (!isIsolated) return 1;
  if (wanted !== undefined && Number.isInteger(wanted) && wanted > 0) return Math.min(wanted, MOST);
  return Math.min(USUAL_MOST, Math.max(Math.min(processors, 2), Math.floor(processors / 2)));
}

/** A memory that workers share; it has the `--initial-memory` of hatch_build.py. */
export function sharedMemory(): WebAssembly.Memory {
  let problem: unknown;
  for (const maximum of PAGES) {
    try {
      return new WebAssembly.Memory({ initial: 64, maximum, shared: true });
    } catch (error) {
      problem = error;
    }
  }
  throw problem;
}

interface OfThread {
  __stack_pointer: WebAssembly.Global;
  __wasm_init_tls(at: number): void;
  lm_work(index: number): void;
}

/** What a worker does with its `ThreadStart`: it says that it is ready, and computes until it is ended. */
export function runThread({ module, memory, index, stack, locals }: ThreadStart, ready: () => void): void {
  const exports = new WebAssembly.Instance(module, { env: { memory } }).exports as unknown as OfThread;
  exports.__stack_pointer.value = stack;
  exports.__wasm_init_tls(locals);
  ready();
  exports.lm_work(index);
}
