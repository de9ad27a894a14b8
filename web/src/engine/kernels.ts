import { EngineError } from "./errors.ts";
import { INTERFACE, layoutOf, writeStruct, type StructName, type Values } from "./layout.ts";
import { sharedMemory } from "./threads.ts";
import type { Kernels as Given, Thread, Threading } from "./types.ts";

/** A module of a function that returns a vector of 128 bits: valid where SIMD is. */
const SIMD = new Uint8Array([0, 97, 115, 109, 1, 0, 0, 0, 1, 5, 1, 96, 0, 1, 123, 3, 2, 1, 0, 10, 10, 1, 8, 0, 65, 0, 253, 15, 253, 98, 11]);

/** What native/llamarium.h declares, where every pointer is a number. */
interface Exports {
  _initialize(): void;
  aligned_alloc(align: number, size: number): number;
  free(at: number): void;
  lm_interface(): number;
  lm_kernels(): number;
  lm_run(model: number, cache: number, batch: number, taps: number, logits: number): number;
  lm_product(matrix: number, x: number, rows: number, bits: number, y: number): number;
  lm_lookup(matrix: number, rows: number, count: number, out: number): number;
  lm_choose(logits: number, rows: number, count: number, how: number, ids: number): number;
  lm_pack(kind: number, rows: number, cols: number, blocks: number, tiles: number): void;
}

/** What the kernels for several threads have besides. */
interface SharedExports extends Exports {
  lm_set_threads(count: number): void;
  __tls_size: WebAssembly.Global<"i32">;
}

const STACK = 2 ** 20; // of a thread, as the first one's in hatch_build.py

const OK = 0, NO_MEMORY = 1, NO_SUCH_ROW = 2;

async function compiled(given: Given): Promise<WebAssembly.Module> {
  if (given instanceof WebAssembly.Module) return given;
  const answer = await fetch(given).catch((error: unknown) => {
    throw new EngineError("network", `${given.pathname}: the kernels cannot be loaded: ${String(error)}; try again`);
  });
  if (!answer.ok) throw new EngineError("network", `${given.pathname}: the kernels cannot be loaded: the server answers ${answer.status}`);
  return WebAssembly.compile(await answer.arrayBuffer());
}

/** The kernels with a memory of their own. */
export class Kernels {
  readonly warnings: string[] = [];
  private readonly others: Thread[] = [];

  private constructor(private readonly exports: Exports, private readonly memory: WebAssembly.Memory) {}

  /** Compile and start them; EngineError "no-simd" where WebAssembly has no SIMD. */
  static async start(given: Given, threading?: Threading): Promise<Kernels> {
    if (typeof WebAssembly !== "object" || !WebAssembly.validate(SIMD)) {
      throw new EngineError("no-simd", "this browser has no WebAssembly with SIMD: use Chrome 91, Firefox 89, Safari 16.4 or newer, or install Llamarium with `pip install llamarium`");
    }
    if (threading === undefined || threading.count < 2) return Kernels.alone(given);
    try {
      return await Kernels.shared(threading);
    } catch (error) {
      const alone = await Kernels.alone(given);
      alone.warnings.push(`threads cannot be started (${error instanceof Error ? error.message : String(error)}); one computes`);
      return alone;
    }
  }

  private static async alone(given: Given): Promise<Kernels> {
    const { exports } = await WebAssembly.instantiate(await compiled(given), {});
    return Kernels.begun(exports, exports["memory"] as WebAssembly.Memory);
  }

  private static async shared({ kernels, count, newThread }: Threading): Promise<Kernels> {
    const module = await compiled(kernels), memory = sharedMemory();
    const { exports } = await WebAssembly.instantiate(module, { env: { memory } });
    const made = Kernels.begun(exports, memory), { __tls_size, lm_set_threads } = exports as unknown as SharedExports;
    try {
      await Promise.all(Array.from({ length: count - 1 }, (_, i) => {
        const thread = newThread(), stack = made.take(STACK, "a thread") + STACK, locals = made.take(__tls_size.value, "a thread");
        made.others.push(thread);
        return thread.start({ module, memory, index: i + 1, stack, locals });
      }));
    } catch (error) {
      made.end();
      throw error;
    }
    lm_set_threads(count);
    return made;
  }

  private static begun(given: WebAssembly.Exports, memory: WebAssembly.Memory): Kernels {
    const exports = given as unknown as Exports;
    exports._initialize();
    const found = exports.lm_interface();
    if (found !== INTERFACE) {
      throw new EngineError("unsupported", `the kernels are of another version (${found}, expected ${INTERFACE}); reload the page`);
    }
    return new Kernels(exports, memory);
  }

  get threads(): number {
    return 1 + this.others.length;
  }

  /** End the other threads; nothing is computed afterwards. */
  end(): void {
    for (const thread of this.others.splice(0)) thread.end();
  }

  get name(): string {
    const bytes = this.bytes, at = this.exports.lm_kernels();
    return new TextDecoder().decode(bytes.slice(at, bytes.indexOf(0, at)));
  }

  /** All of memory, as it is now: it moves when it grows, so that nobody keeps this. */
  get bytes(): Uint8Array {
    return new Uint8Array(this.memory.buffer);
  }

  /** Take memory for `size` bytes, at a multiple of 64; EngineError "no-memory". */
  take(size: number, what: string): number {
    const rounded = Math.ceil(Math.max(size, 1) / 64) * 64;
    const at = rounded < 2 ** 32 ? this.exports.aligned_alloc(64, rounded) >>> 0 : 0;
    if (at !== 0) return at;
    const used = Math.round(this.memory.buffer.byteLength / 2 ** 20);
    throw new EngineError(
      "no-memory", `${what} needs ${Math.ceil(size / 2 ** 20)} MB beside the ${used} MB in use, and there is no memory left; close other tabs, use a shorter text or a smaller model`,
    );
  }

  give(at: number): void {
    this.exports.free(at);
  }

  /** Run `work` with memory that is given back afterwards. */
  scoped<T>(work: (take: (size: number, what: string) => number) => T): T {
    const taken: number[] = [];
    try {
      return work((size, what) => {
        const at = this.take(size, what);
        taken.push(at);
        return at;
      });
    } finally {
      taken.forEach((at) => this.give(at));
    }
  }

  floats(at: number, count: number): Float32Array {
    return new Float32Array(this.memory.buffer, at, count);
  }

  ints(at: number, count: number): Int32Array {
    return new Int32Array(this.memory.buffer, at, count);
  }

  /** 64-bit whole numbers. */
  putIds(at: number, ids: readonly number[]): void {
    const view = new DataView(this.memory.buffer);
    ids.forEach((id, i) => view.setBigInt64(at + 8 * i, BigInt(id), true));
  }

  write(name: StructName, at: number, values: Values): void {
    writeStruct(new DataView(this.memory.buffer), name, at, values);
  }

  /** Take memory for a struct, or several, and write them. */
  put(name: StructName, ...all: Values[]): number {
    const { size } = layoutOf(name), at = this.take(size * all.length, name);
    all.forEach((values, i) => this.write(name, at + i * size, values));
    return at;
  }

  run(model: number, cache: number, batch: number, taps: number, logits: number): void {
    this.check(this.exports.lm_run(model, cache, batch, taps, logits));
  }

  product(matrix: number, x: number, rows: number, bits: number, y: number): void {
    this.check(this.exports.lm_product(matrix, x, rows, bits, y));
  }

  lookup(matrix: number, rows: number, count: number, out: number): void {
    this.check(this.exports.lm_lookup(matrix, rows, count, out));
  }

  choose(logits: number, count: number, how: number, ids: number): void {
    this.check(this.exports.lm_choose(logits, 1, count, how, ids));
  }

  pack(kind: number, rows: number, cols: number, blocks: number, tiles: number): void {
    this.exports.lm_pack(kind, rows, cols, blocks, tiles);
  }

  private check(code: number): void {
    if (code === OK) return;
    if (code === NO_MEMORY) throw new EngineError("no-memory", "there is no memory left for this pass; use a shorter text or a smaller model");
    throw new EngineError("input", code === NO_SUCH_ROW ? "there is no such row or token" : "the batch names a position, block or edit that there is not");
  }
}
