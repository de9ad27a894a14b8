/** Runs calls of the engine that a test in Python writes as JSON, and prints what they return. Float32Arrays are base64. */
import { openAsBlob, readFileSync } from "node:fs";
import { Metadata } from "../../src/engine/config.ts";
import { EngineError, layoutOf, openModel, STRUCTS, type Model } from "../../src/engine/index.ts";
import type { StructName } from "../../src/engine/layout.ts";
import { readTokenizer } from "../../src/engine/tokenizer/index.ts";
import { Refused } from "../../src/site/asked.ts";
import { written } from "../../src/site/chat/jinja.ts";
import { ChatTemplate, templateOf } from "../../src/site/chat/template.ts";
import { Passes } from "../../src/site/passes.ts";
import { answer, type Opened, type Question } from "../../src/site/routes.ts";
import { nodeThreads } from "./node-threads.ts";

interface Call {
  name: string;
  args: unknown[];
}

/** A change of a file: it is cut, or some of its bytes are others. */
interface Mutation {
  length?: number;
  bytes?: [place: number, value: number][];
}

interface Job {
  kernels: string;
  /** Of several threads: their kernels, and thread.ts as one file. */
  sharedKernels: string;
  thread: string;
  threads?: number;
  model?: string;
  url?: string;
  hasNoSimd?: boolean;
  context?: number;
  calls?: Call[];
  /** What a page asks of its worker; `{id}` in a path is that of the last pass. */
  questions?: Question[];
  mutations?: Mutation[];
  vocabularies?: { metadata: [string, string | number | boolean | string[]][]; texts: string[] }[];
}

interface Encoded {
  base64: string;
}

const isEncoded = (value: unknown): value is Encoded => typeof value === "object" && value !== null && "base64" in value;

function revive(_: string, value: unknown): unknown {
  return isEncoded(value) ? new Float32Array(new Uint8Array(Buffer.from(value.base64, "base64")).buffer) : value;
}

function replace(_: string, value: unknown): unknown {
  if (value instanceof Float32Array) return { base64: Buffer.from(value.buffer, value.byteOffset, value.byteLength).toString("base64") };
  return value instanceof Uint8Array ? [...value] : value;
}

const job = JSON.parse(readFileSync(0, "utf8"), revive) as Job;
const kernels = new WebAssembly.Module(readFileSync(job.kernels));

if (job.hasNoSimd) WebAssembly.validate = () => false;

/** What a call returns, or which error it throws. */
function outcome(work: () => unknown): unknown {
  try {
    return work();
  } catch (error) {
    if (error instanceof EngineError) return { error: error.code, message: error.message };
    throw error;
  }
}

function called(model: Model, { name, args }: Call): unknown {
  const member = (model as unknown as Record<string, unknown>)[name];
  return typeof member === "function" ? (member as (...all: unknown[]) => unknown).apply(model, args) : member;
}

async function opened(source: Blob | ArrayBuffer | URL): Promise<Model | { error: string; message: string }> {
  try {
    const name = (job.model ?? job.url ?? "").split("/").pop() ?? "";
    const threading = job.threads === undefined ? {} : { threading: nodeThreads(job.sharedKernels, job.thread, job.threads) };
    return await openModel(source, kernels, { name, ...threading, ...(job.context === undefined ? {} : { context: job.context }) });
  } catch (error) {
    if (error instanceof EngineError) return { error: error.code, message: error.message };
    throw error;
  }
}

/** All events of an answer, or why there is none. */
async function answered(opened: Opened, question: Question): Promise<unknown> {
  try {
    const told = answer(opened, question);
    if (!("events" in told)) return "json" in told ? told.json : told.numbers;
    const all: unknown[] = [];
    for (let next = await told.events.next(); !next.done; next = await told.events.next()) if (next.value !== null) all.push(next.value);
    return all;
  } catch (error) {
    if (error instanceof EngineError) return { error: error.code, message: error.message };
    if (error instanceof Refused) return { status: error.status, error: error.code, param: error.param, message: error.message };
    throw error;
  }
}

function openedOf(model: Model): Opened {
  const template = templateOf(model);
  const chat = template === null ? null : new ChatTemplate(model, template, (one) => Promise.resolve(written(one)));
  return { passes: new Passes(model), command: "llamarium inspect", chat, lesson: null };
}

async function mutated(file: Uint8Array, { length = file.length, bytes = [] }: Mutation): Promise<unknown> {
  const changed = file.slice(0, length), begin = performance.now();
  for (const [place, value] of bytes) changed[place] = value;
  const model = await opened(changed.buffer);
  const result = "error" in model ? model : outcome(() => (model.run({ ids: [1, 2, 3], start: 0 }), null));
  return { result, ms: performance.now() - begin };
}

async function results(): Promise<unknown> {
  if (job.vocabularies !== undefined) {
    return job.vocabularies.map(({ metadata, texts }) => outcome(() => {
      const tokenizer = readTokenizer(new Metadata("test", new Map(metadata)), 2 ** 20);
      return texts.map((text) => outcome(() => {
        const ids = tokenizer.encode(text, {}), special = tokenizer.encode(text, { special: true });
        return { ids, special, text: tokenizer.decode(ids, true), pieces: ids.map((id) => tokenizer.piece(id)) };
      }));
    }));
  }
  if (job.mutations !== undefined) {
    const file = new Uint8Array(readFileSync(job.model ?? ""));
    const all: unknown[] = [];
    for (const mutation of job.mutations) all.push(await mutated(file, mutation));
    return all;
  }
  if (job.model === undefined && job.url === undefined) {
    return Object.fromEntries((Object.keys(STRUCTS) as StructName[]).map((name) => [name, layoutOf(name)]));
  }
  const model = await opened(job.url === undefined ? await openAsBlob(job.model ?? "") : new URL(job.url));
  if (job.questions !== undefined && !("error" in model)) {
    const opened = openedOf(model), all: unknown[] = [];
    let pass = "";
    for (const question of job.questions) {
      all.push(await answered(opened, { ...question, path: question.path.replace("{id}", pass) }));
      if (question.path === "/inspect/passes") pass = (all.at(-1) as { id: string }).id;
    }
    return all;
  }
  return "error" in model ? model : (job.calls ?? []).map((call) => outcome(() => called(model, call)));
}

process.stdout.write(JSON.stringify(await results(), replace), () => process.exit()); // threads would stay
