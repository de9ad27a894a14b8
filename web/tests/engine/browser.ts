/** The engine in a worker of a browser, timed: `bench/site.py` bundles it, opens a model, and asks for rounds. */
import { openModel, type Model } from "../../src/engine/index.ts";

interface Open {
  readonly file: string;
  readonly kernels: string;
  readonly context: number;
}

interface Round {
  readonly prompt: string;
  /** How many tokens are answered. */
  readonly answer: number;
}

let model: Model;

/** Seconds of some work. */
async function seconds<T>(work: () => T | Promise<T>): Promise<[number, T]> {
  const begin = performance.now(), result = await work();
  return [(performance.now() - begin) / 1000, result];
}

async function open({ file, kernels, context }: Open): Promise<object> {
  const [opening, opened] = await seconds(() => openModel(new URL(file), new URL(kernels), { context }));
  model = opened;
  return { seconds: opening };
}

/** Tokens per second of a prompt, and of an answer behind it. */
async function round({ prompt, answer }: Round): Promise<object> {
  model.reset();
  const ids = model.config.tokens === null ? prompt.trim().split(" ").map((_, i) => i) : model.encode(prompt).ids; // random weights have no vocabulary
  const [reading, { logits }] = await seconds(() => model.run({ ids, start: 0 }));
  const [answering] = await seconds(() => {
    let last = logits;
    for (let step = 0; step < answer; step++) {
      const id = model.sample(last, { temperature: 0.8, topP: 0.9, seed: 7, step });
      last = model.run({ ids: [id], start: ids.length + step }).logits;
    }
  });
  return { prompt: ids.length / reading, answer: answer / answering };
}

self.addEventListener("message", ({ data }: MessageEvent<Open | Round>) => {
  ("file" in data ? open(data) : round(data)).then(postMessage, (error: unknown) => postMessage({ error: String(error) }));
});
