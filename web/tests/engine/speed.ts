/**
 * How fast the engine is in Node.js: on one thread by processor seconds, so that neighbours count little, and on several by the clock:
 *
 *     for name in speed thread; do node_modules/.bin/rolldown tests/engine/$name.ts --file /tmp/$name.mjs --format esm --platform node; done
 *     node /tmp/speed.mjs ../src/llamarium/kernels/_native.wasm MODEL.gguf [THREADS]
 */
import { openAsBlob, readFileSync } from "node:fs";
import { openModel } from "../../src/engine/index.ts";
import { nodeThreads } from "./node-threads.ts";

const PROMPT = 128, ANSWER = 64, ROUNDS = 3;

const [, , kernels = "", file = "", threads = "1"] = process.argv;
const count = Number(threads);

/** Seconds of some work. */
async function seconds<T>(work: () => T | Promise<T>): Promise<[number, T]> {
  const before = process.cpuUsage(), begin = performance.now(), result = await work(), { user, system } = process.cpuUsage(before);
  return [count > 1 ? (performance.now() - begin) / 1e3 : (user + system) / 1e6, result];
}

const threading = nodeThreads(kernels.replace(/\.wasm$/, "_threads.wasm"), new URL("thread.mjs", import.meta.url).pathname, count);
const [opening, model] = await seconds(async () => openModel(await openAsBlob(file), new WebAssembly.Module(readFileSync(kernels)), { threading }));
console.log(`open ${opening.toFixed(2)} s, ${model.config.kernels}, ${model.config.threads} threads`);
const { ids } = model.encode("To be, or not to be: that is the question: ");
const prompt = Array.from({ length: PROMPT }, (_, i) => ids[i % ids.length] as number);
for (let round = 0; round < ROUNDS; round++) {
  model.reset();
  const [reading, { logits }] = await seconds(() => model.run({ ids: prompt, start: 0 }));
  const [answering] = await seconds(() => {
    let last = logits;
    for (let step = 0; step < ANSWER; step++) {
      const id = model.sample(last, { temperature: 0.8, topP: 0.9, seed: 7, step });
      last = model.run({ ids: [id], start: PROMPT + step }).logits;
    }
  });
  console.log(`prompt of ${PROMPT}: ${(PROMPT / reading).toFixed(1)} tokens/s, answer of ${ANSWER}: ${(ANSWER / answering).toFixed(1)} tokens/s`);
}
console.log(`${Math.round(process.memoryUsage().rss / 2 ** 20)} MB resident`);
model.close();
