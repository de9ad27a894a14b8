/** The page's requests; it sends none to other servers. */

import { send } from "./backend";
import { Kept, type Sized } from "./kept";
import { decode, type Numbers } from "./numbers";
import type {
  Attribution,
  ClassLesson,
  TokenCost,
  DistancesView,
  HeadsView,
  Lens,
  ModelView,
  NeighborsRequest,
  Neighbors,
  Neurons,
  NextView,
  PassRequest,
  PassView,
  RopeView,
  SamplerRequest,
  SamplerSteps,
  ScoreView,
  SimilarityRequest,
  Similarity,
  SourceView,
  TicketRequest,
  TicketView,
  TokensRequest,
  TokensView,
  TokenView,
  TranslationRequest,
  TranslationView,
  WordRequest,
} from "../schema";

/** An answer that is none: the server has refused, or is not there (status 0). */
export class Refusal extends Error {
  constructor(
    readonly status: number,
    message: string,
    readonly code: string | null = null,
    readonly param: string | null = null,
    readonly retryAfter = 1,
  ) {
    super(message);
  }
}

export interface Selection {
  layer?: number;
  head?: number;
  position?: number;
  /** Of the axis T. */
  start?: number;
  stop?: number;
  stride?: number;
  dtype?: "float32" | "float16" | "uint8";
}

const KEY = "llamarium-key";
const INSTANCE = "x-llamarium-instance"; // as `llamarium/page/instance.py` writes it
const kept = new Kept(100e6);
let instance: string | undefined;

/** What every response says of the server: that the key is wrong, that it loads or is gone, or that another process answers now. */
export const heard = {
  refused: (_refusal: Refusal): void => undefined,
  replaced: (): void => undefined,
};

export const key = {
  get: (): string => sessionStorage.getItem(KEY) ?? "",
  set: (value: string): void => {
    sessionStorage.setItem(KEY, value);
    kept.clear();
  },
};

/** Ask the server; a refusal is thrown. Whoever gives a signal may end the asking, and gets its own error then. */
export async function fetched(method: string, path: string, body?: unknown, signal?: AbortSignal): Promise<Response> {
  const headers: Record<string, string> = key.get() ? { authorization: `Bearer ${key.get()}` } : {};
  if (body !== undefined) headers["content-type"] = "application/json";
  let answer: Response;
  try {
    answer = await send(path, { method, headers, body: body === undefined ? null : JSON.stringify(body), signal: signal ?? null });
  } catch (error) {
    if (signal?.aborted) throw error;
    const gone = new Refusal(0, "the server does not answer; it may have been stopped", "gone");
    heard.refused(gone);
    throw gone;
  }
  notice(answer);
  if (answer.ok) return answer;
  const refused = await refusal(answer);
  if (refused.status === 401 || refused.code === "loading") heard.refused(refused);
  throw refused;
}

/** Another process behind the same address may have another model: nothing that is kept is its answer. */
function notice(answer: Response): void {
  const told = answer.headers.get(INSTANCE);
  if (told === null || told === instance) return;
  const isOther = instance !== undefined;
  instance = told;
  if (!isOther) return;
  kept.clear();
  heard.replaced();
}

async function refusal(answer: Response): Promise<Refusal> {
  const wait = Number(answer.headers.get("retry-after") ?? 1);
  try {
    const { error } = (await answer.json()) as { error: { message: string; code: string | null; param: string | null } };
    return new Refusal(answer.status, error.message, error.code, error.param, wait);
  } catch {
    return new Refusal(answer.status, `the server answered with status ${answer.status}`, null, null, wait);
  }
}

/** Read an answer to its end; one that breaks off, or is something else than was asked for, is none. */
async function read<T>(work: () => Promise<T>): Promise<T> {
  try {
    return await work();
  } catch (error) {
    const why = error instanceof Error ? error.message : String(error);
    throw new Refusal(0, `the server's answer broke off, or is not what was asked for (${why})`, "broken");
  }
}

async function sized<T>(method: string, path: string, body?: unknown): Promise<Sized<T>> {
  const answer = await fetched(method, path, body);
  return await read(async () => {
    const text = await answer.text();
    return { value: JSON.parse(text) as T, bytes: 2 * text.length };
  });
}

/** Ask for JSON, whether or not it has been asked for before. */
export async function json<T>(method: string, path: string, body?: unknown): Promise<T> {
  return (await sized<T>(method, path, body)).value;
}

export function get<T>(path: string): Promise<T> {
  return kept.once(path, () => sized<T>("GET", path));
}

export function post<T>(path: string, body: unknown): Promise<T> {
  return kept.once(`${path} ${JSON.stringify(body)}`, () => sized<T>("POST", path, body));
}

export function bulk(path: string): Promise<Numbers> {
  return kept.once(path, async () => {
    const answer = await fetched("GET", path);
    return await read(async () => {
      const value = decode(answer.headers, await answer.arrayBuffer());
      return { value, bytes: value.values.byteLength };
    });
  });
}

export function query(fields: object): string {
  const named = new URLSearchParams();
  for (const [name, value] of Object.entries(fields)) if (value !== undefined) named.set(name, String(value));
  return named.size ? `?${named}` : "";
}

/** What names a pass by its ids, so that it can be asked for again, or with something otherwise. */
export function namedBy(pass: PassView): PassRequest {
  const ids = pass.tokens.map((token) => token.id) as [number, ...number[]];
  return { ids, adapter: pass.adapter, experiment: pass.experiment };
}

/** Ask for something of a pass; one that the server has forgotten is named anew, once. */
export async function ofPass<T>(pass: PassView, ask: () => Promise<T>): Promise<T> {
  try {
    return await ask();
  } catch (error) {
    if (!(error instanceof Refusal) || error.code !== "unknown_pass") throw error;
    await fetched("POST", "/inspect/passes", namedBy(pass));
    return await ask();
  }
}

export const api = {
  health: async (): Promise<{ status: string; progress?: number }> => {
    const answer = await send("/health", { method: "GET" }).catch(() => null);
    if (!answer) throw new Refusal(0, "the server does not answer; it may have been stopped", "gone");
    return await read(async () => (await answer.json()) as { status: string; progress?: number });
  },
  enter: (body: TicketRequest): Promise<TicketView> => json("POST", "/inspect/ticket", body),
  model: (shape?: string): Promise<ModelView> => get(`/inspect/model${query({ shape })}`),
  lesson: (): Promise<ClassLesson> => get("/inspect/lesson"),
  source: (name: string): Promise<SourceView> => get(`/inspect/source${query({ name })}`),
  weights: (name: string): Promise<Numbers> => bulk(`/inspect/weights${query({ key: name })}`),
  rows: (ids: number[], random_seed?: number): Promise<Numbers> =>
    bulk(`/inspect/rows${query({ ids: ids.join(","), random_seed })}`),
  tokens: (body: TokensRequest): Promise<TokensView> => post("/inspect/tokens", body),
  pass: (body: PassRequest): Promise<PassView> => post("/inspect/passes", body),
  /** As above, but requested again, so that the result is the server's present state. */
  passAnew: (body: PassRequest): Promise<PassView> => json("POST", "/inspect/passes", body),
  neighbors: (body: NeighborsRequest): Promise<Neighbors> => post("/inspect/neighbors", body),
  translate: (body: TranslationRequest): Promise<TranslationView> => post("/inspect/translations", body),
  similarity: (body: SimilarityRequest): Promise<Similarity> => post("/inspect/similarity", body),
  activation: (pass: PassView, name: string, selection: Selection = {}): Promise<Numbers> =>
    ofPass(pass, () => bulk(`/inspect/passes/${pass.id}/activations/${name}${query(selection)}`)),
  /** A pass as a whole, as `inspect/probes/picture.py` says. */
  picture: (pass: PassView, asked: { start: number; stop: number; stride: number; blocks?: boolean }): Promise<Numbers> =>
    ofPass(pass, () => bulk(`/inspect/passes/${pass.id}/picture${query(asked)}`)),
  word: (body: WordRequest): Promise<TokenView> => post("/inspect/word", body),
  rope: (position: number, shape?: string): Promise<RopeView> => get(`/inspect/rope${query({ position, shape })}`),
  heads: (pass: PassView, asked: { layer: number; position: number }): Promise<HeadsView> =>
    ofPass(pass, () => get(`/inspect/passes/${pass.id}/heads${query(asked)}`)),
  headsAdded: (pass: PassView, asked: { layer: number; position: number }): Promise<Numbers> =>
    ofPass(pass, () => bulk(`/inspect/passes/${pass.id}/heads/added${query(asked)}`)),
  neurons: (pass: PassView, asked: { layer: number; position: number; k: number; stride: number }): Promise<Neurons> =>
    ofPass(pass, () => get(`/inspect/passes/${pass.id}/neurons${query(asked)}`)),
  attribution: (pass: PassView, asked: { position: number; token_id: number; against_id?: number | undefined }): Promise<Attribution> =>
    ofPass(pass, () => get(`/inspect/passes/${pass.id}/attribution${query(asked)}`)),
  lens: (pass: PassView, asked: { position: number; token_id: number; k: number }): Promise<Lens> =>
    ofPass(pass, () => get(`/inspect/passes/${pass.id}/lens${query(asked)}`)),
  distances: (
    pass: PassView,
    asked: { layer: number; head: number; position: number; key: number; stop: number; stride: number },
  ): Promise<DistancesView> => ofPass(pass, () => get(`/inspect/passes/${pass.id}/distances${query(asked)}`)),
  sampler: (pass: PassView, body: SamplerRequest): Promise<SamplerSteps> =>
    ofPass(pass, () => post(`/inspect/passes/${pass.id}/sampler`, body)),
  cost: (pass: PassView): Promise<TokenCost> => ofPass(pass, () => get(`/inspect/passes/${pass.id}/cost`)),
  score: (pass: PassView, start: number): Promise<ScoreView> =>
    ofPass(pass, () => get(`/inspect/passes/${pass.id}/score${query({ start })}`)),
  /** Small numbers that follow from a pass: `/inspect/passes/{id}/{name}`. */
  view: <T>(pass: PassView, name: string, fields: object = {}): Promise<T> =>
    ofPass(pass, () => get<T>(`/inspect/passes/${pass.id}/${name}${query(fields)}`)),
  next: (pass: PassView, position: number, k: number): Promise<NextView> =>
    api.view<NextView>(pass, "next", { position, k }),
};
