/**
 * How fast the engine is in Node.js, on one thread, by processor seconds, so that neighbours count little:
 *
 *     node_modules/.bin/rolldown tests/engine/speed.ts --file /tmp/speed.mjs --format esm --platform node
 *     node /tmp/speed.mjs ../src/llamarium/kernels/_native.wasm MODEL.gguf
 */
import { openAsBlob, readFileSync } from "node:fs";
import { openModel } from "../../src/engine/index.ts";

const PROMPT = 128, ANSWER = 64, ROUNDS = 3;

/** Processor seconds of some work. */
async function seconds<T>(work: () => T | Promise<T>): Promise<[number, T]> {
  const before = process.cpuUsage(), result = await work(), { user, system } = process.cpuUsage(before);
  return [(user + system) / 1e6, result];
}

const [, , kernels = "", file = ""] = process.argv;
const [opening, model] = await seconds(async () => openModel(await openAsBlob(file), new WebAssembly.Module(readFileSync(kernels))));
console.log(`open ${opening.toFixed(2)} s, ${model.config.kernels}`);
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
