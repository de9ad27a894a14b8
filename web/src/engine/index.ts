/** The engine of the page without a server: opens a GGUF file and runs it where this code runs. `types.ts` is its interface. */
import { Metadata, readRotation, readShape } from "./config.ts";
import { EngineError } from "./errors.ts";
import { readHeader } from "./gguf.ts";
import { Kernels } from "./kernels.ts";
import { NativeModel } from "./model.ts";
import { openSource, type Reader } from "./source.ts";
import { readTokenizer, type Tokenizer } from "./tokenizer/index.ts";
import type { Kernels as Given, Model, ModelConfig, OpenModel, OpenOptions, Progress, Source } from "./types.ts";
import { loadWeights } from "./weights.ts";

export { EngineError } from "./errors.ts";
export { layoutOf, STRUCTS } from "./layout.ts";
export type * from "./types.ts";

const USUAL_CONTEXT = 2048;

/** Read the vocabulary; one that is not read here is a warning, since ids can be run without it. */
function tokenizerOf(metadata: Metadata, rows: number): Tokenizer | null {
  try {
    return readTokenizer(metadata, rows);
  } catch (error) {
    if (!(error instanceof EngineError)) throw error;
    metadata.warnings.push(error.message);
    return null;
  }
}

/** The file's beginning and the kernels, which are fetched at the same time; where one fails, the other is closed. */
async function both(opening: Promise<Reader>, starting: Promise<Kernels>): Promise<[Reader, Kernels]> {
  const [reader, kernels] = await Promise.allSettled([opening, starting]);
  if (reader.status === "fulfilled" && kernels.status === "fulfilled") return [reader.value, kernels.value];
  if (reader.status === "fulfilled") reader.value.close();
  if (kernels.status === "fulfilled") kernels.value.end();
  throw [kernels, reader].find((one) => one.status === "rejected")?.reason; // without kernels no other file helps
}

/** Open a model; rejects with an EngineError. */
export const openModel: OpenModel = async (source: Source, given: Given, options: OpenOptions | ((progress: Progress) => void) = {}): Promise<Model> => {
  const { onProgress, context, name, threading } = typeof options === "function" ? { onProgress: options } as OpenOptions : options;
  const [reader, kernels] = await both(openSource(source, name), Kernels.start(given, threading));
  try {
    const header = await readHeader(reader), metadata = new Metadata(reader.name, header.metadata);
    const shape = readShape(metadata, header), tokenizer = tokenizerOf(metadata, shape.vocab);
    const { weights, divisors, warnings } = await loadWeights(kernels, header, shape, onProgress);
    const rotation = readRotation(metadata, shape, divisors), norm = weights.get("model.norm.weight");
    const names = [...weights.keys()];
    const config: ModelConfig = {
      name: metadata.text("general.name") ?? reader.name, hidden: shape.hidden, intermediate: shape.intermediate, layers: shape.layers,
      heads: shape.heads, kvHeads: shape.kvHeads, headDim: shape.headDim, vocab: shape.vocab,
      context: Math.max(1, Math.min(context ?? USUAL_CONTEXT, shape.maxContext)), maxContext: shape.maxContext, window: shape.window,
      normEps: shape.normEps, ropeTheta: shape.ropeTheta, frequencies: rotation.frequencies, attentionFactor: rotation.attentionFactor,
      tied: shape.tied, names, weights: Object.fromEntries([...weights].map(([key, { shape: own, type, bytes }]) => [key, { shape: own, type, bytes }])),
      kvDtype: norm?.type === "BF16" ? "bfloat16" : "float32", inputBits: 8, tokens: tokenizer?.kind ?? null, hasPrefix: tokenizer?.hasPrefix ?? false, bosId: tokenizer?.named.bos ?? null,
      eosId: tokenizer?.named.eos ?? null, padId: tokenizer?.named.pad ?? null,
      endIds: tokenizer?.ends ?? [], chatTemplate: metadata.text("tokenizer.chat_template"), kernels: kernels.name, threads: kernels.threads,
      warnings: [...kernels.warnings, ...metadata.warnings, ...warnings],
    };
    return new NativeModel({ kernels, shape, rotation, weights, tokenizer, config });
  } catch (error) {
    kernels.end();
    throw error;
  } finally {
    reader.close();
  }
};
