/** The page's requests; it sends none to other servers. */

import { send } from "./backend";
import { Kept, type Sized } from "./kept";
import { recall, remember } from "./memory";
import { decode, type Numbers } from "./numbers";
import type { ActivationQuery, ClassLesson, OfModel, OfPass, PassRequest, PassView, TicketRequest, TicketView } from "../schema";

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

const KEY = "llamarium-key";
const INSTANCE = "x-llamarium-instance"; // as `llamarium/page/instance.py` writes it
const kept = new Kept(100e6);
let instance: string | undefined;
/** How many models the page itself has put in the place of another. */
let replaced = 0;

/** What every response says of the server: that the key is wrong, that it loads or is gone, or that another process answers now. */
export const heard = {
  refused: (_refusal: Refusal): void => undefined,
  replaced: (): void => undefined,
};

const ofTab = (): Storage => sessionStorage;
let unstored = ""; // the key, where the browser stores nothing

export const key = {
  get: (): string => recall(KEY, ofTab) ?? unstored,
  set: (value: string): void => {
    unstored = remember(KEY, value, ofTab) ? "" : value;
    kept.clear();
  },
};

/** Ask the server; a refusal is thrown. Whoever gives a signal may end the asking, and gets its own error then. */
export async function fetched(method: string, path: string, body?: unknown, signal?: AbortSignal): Promise<Response> {
  const headers: Record<string, string> = key.get() ? { authorization: `Bearer ${key.get()}` } : {};
  if (body !== undefined) headers["content-type"] = "application/json";
  let answer: Response;
  const askedOf = replaced;
  try {
    answer = await send(path, { method, headers, body: body === undefined ? null : JSON.stringify(body), signal: signal ?? null });
  } catch (error) {
    if (signal?.aborted) throw error;
    const gone = new Refusal(0, "the server does not answer; it may have been stopped", "gone");
    heard.refused(gone);
    throw gone;
  }
  if (askedOf === replaced) notice(answer); // otherwise the previous model has answered
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

/** The page itself has opened another model: nothing that is kept is its answer. */
export function expectAnother(): void {
  instance = undefined;
  replaced++;
  kept.clear();
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

/** Ask for JSON, or for numbers in bulk: the headers say which has come. */
async function sized<T>(method: string, path: string, body?: unknown, signal?: AbortSignal): Promise<Sized<T>> {
  const answer = await fetched(method, path, body, signal);
  return await read(async () => {
    if (answer.headers.has("x-dtype")) {
      const value = decode(answer.headers, await answer.arrayBuffer());
      return { value: value as T, bytes: value.values.byteLength };
    }
    const text = await answer.text();
    return { value: JSON.parse(text) as T, bytes: 2 * text.length };
  });
}

/** Ask for JSON, whether or not it has been asked for before. */
export async function json<T>(method: string, path: string, body?: unknown): Promise<T> {
  return (await sized<T>(method, path, body)).value;
}

export function get<T>(path: string, signal?: AbortSignal): Promise<T> {
  return kept.once(path, () => sized<T>("GET", path, undefined, signal));
}

export function post<T>(path: string, body: unknown): Promise<T> {
  return kept.once(`${path} ${JSON.stringify(body)}`, () => sized<T>("POST", path, body));
}

export function query(fields: object): string {
  const named = new URLSearchParams();
  for (const [name, value] of Object.entries(fields)) if (value !== undefined && value !== null) named.set(name, String(value));
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

/** Fields that may be left out may be undefined, too. */
type Given<T> = { [K in keyof T]: T[K] | undefined };
export type Selection = Given<ActivationQuery>;
/** What stands in braces in a probe's path. */
type InPath<Name> = Name extends `${string}{${infer Field}}${string}` ? Record<Field, string> : unknown;
type Asked<Name, Probe> = (Probe extends { query: infer Q } ? Given<Q> : unknown) & InPath<Name>;
/** Whether anything has to be given; a signal ends the asking, also for others who ask the same. */
type Fields<T> = object extends T ? [fields?: T, signal?: AbortSignal] : [fields: T, signal?: AbortSignal];
/** Numbers in bulk where the table names no type. */
type Answer<Probe> = Probe extends { answer: infer A } ? A : Numbers;
type Body<Probe> = Probe extends { body: infer B } ? B : never;

function address(start: string, name: string, asked?: unknown): string {
  const fields = { ...(asked as Record<string, unknown> | undefined) };
  const path = name.replace(/\{(\w+)\}/g, (_, field: string) => {
    const value = String(fields[field]);
    delete fields[field];
    return encodeURIComponent(value);
  });
  return `/inspect/${start}${path}${query(fields)}`;
}

const below = (pass: PassView): string => `passes/${pass.id}/`;

/** The requests of the page. Names and types of probes are those of the server's table, `llamarium/page/probes/table.py`. */
export const api = {
  health: async (): Promise<{ status: string; progress?: number }> => {
    const answer = await send("/health", { method: "GET" }).catch(() => null);
    if (!answer) throw new Refusal(0, "the server does not answer; it may have been stopped", "gone");
    return await read(async () => (await answer.json()) as { status: string; progress?: number });
  },
  enter: (body: TicketRequest): Promise<TicketView> => json("POST", "/inspect/ticket", body),
  lesson: (): Promise<ClassLesson> => get("/inspect/lesson"),
  pass: (body: PassRequest): Promise<PassView> => post("/inspect/passes", body),
  /** As above, but requested again, so that the result is the server's present state. */
  passAnew: (body: PassRequest): Promise<PassView> => json("POST", "/inspect/passes", body),
  /** Ask a probe of the model. */
  get: <N extends keyof OfModel>(name: N, ...[fields, signal]: Fields<Asked<N, OfModel[N]>>): Promise<Answer<OfModel[N]>> =>
    get(address("", name, fields), signal),
  /** As above, but requested again. */
  anew: <N extends keyof OfModel>(name: N, fields: Asked<N, OfModel[N]>): Promise<Answer<OfModel[N]>> => json("GET", address("", name, fields)),
  /** Ask a probe of the model that has a body. */
  send: <N extends keyof OfModel>(name: N, body: Body<OfModel[N]>): Promise<Answer<OfModel[N]>> => post(`/inspect/${name}`, body),
  /** Ask a probe of a pass. */
  of: <N extends keyof OfPass>(pass: PassView, name: N, ...[fields, signal]: Fields<Asked<N, OfPass[N]>>): Promise<Answer<OfPass[N]>> =>
    ofPass(pass, () => get(address(below(pass), name, fields), signal)),
  /** Ask a probe of a pass that has a body. */
  post: <N extends keyof OfPass>(pass: PassView, name: N, body: Body<OfPass[N]>): Promise<Answer<OfPass[N]>> =>
    ofPass(pass, () => post(address(below(pass), name), body)),
  activation: (pass: PassView, name: string, selection: Selection = {}): Promise<Numbers> => api.of(pass, "activations/{name}", { name, ...selection }),
  rows: (ids: readonly number[], random_seed?: number): Promise<Numbers> => api.get("rows", { ids: ids.join(","), random_seed }),
};
