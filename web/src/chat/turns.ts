/** A conversation as a tree: editing a turn or generating again adds a version beside the one that is there, and none is lost. */

import type { Form, Parameters } from "../lib/sampling.svelte";

export interface AnswerToken {
  id: number;
  text: string;
  /** Of the model alone, before any parameter of the sampler. */
  logprob: number;
}

interface Call {
  id: string;
  name: string;
  /** The text of a JSON object, or the beginning of one. */
  arguments: string;
}

/** What an answer was asked with. */
export interface Asked {
  system: string;
  params: Parameters;
  maxTokens: number | null;
  adapter: string | null;
  /** What held it to a form: a schema, or tools whose calls follow theirs. */
  form: Form;
}

export interface Turn {
  id: number;
  /** The turn before it; 0 is the beginning. */
  parent: number;
  role: "user" | "assistant" | "tool";
  text: string;
  calls: readonly Call[];
  /** A tool's results, by the id of the call. */
  results: Readonly<Record<string, string>>;
  state: "whole" | "coming" | "unfinished";
  /** Why it is unfinished. */
  why: string;
  /** Why the model ended it. */
  reason: string | null;
  promptIds: readonly number[];
  tokens: readonly AnswerToken[];
  asked: Asked | null;
}

export interface Tree {
  turns: readonly Turn[];
  /** Which version comes after a turn, by that turn's id; the newest where none is chosen. */
  chosen: Readonly<Record<number, number>>;
}

export const EMPTY: Tree = { turns: [], chosen: {} };

export function newTurn(tree: Tree, parent: number, role: Turn["role"], given: Partial<Turn> = {}): Turn {
  const id = 1 + Math.max(0, ...tree.turns.map((turn) => turn.id));
  return {
    id, parent, role, text: "", calls: [], results: {}, state: "whole", why: "", reason: null, promptIds: [], tokens: [], asked: null, ...given,
  };
}

/** Add a turn, and go on from it. */
export function added(tree: Tree, turn: Turn): Tree {
  return { turns: [...tree.turns, turn], chosen: { ...tree.chosen, [turn.parent]: turn.id } };
}

export function changed(tree: Tree, id: number, by: (turn: Turn) => Turn): Tree {
  return { ...tree, turns: tree.turns.map((turn) => (turn.id === id ? by(turn) : turn)) };
}

export function without(tree: Tree, id: number): Tree {
  const chosen = Object.fromEntries(Object.entries(tree.chosen).filter(([, child]) => child !== id));
  return { turns: tree.turns.filter((turn) => turn.id !== id), chosen };
}

/** The versions of what comes after a turn, the oldest first. */
export function versions(tree: Tree, parent: number): Turn[] {
  return tree.turns.filter((turn) => turn.parent === parent);
}

/** The turns that are shown: from the beginning along the chosen versions; up to a turn, that included, where one is named. */
export function path(tree: Tree, upTo?: number): Turn[] {
  const found: Turn[] = [];
  for (let at = 0; ; ) {
    const all = versions(tree, at);
    const next = all.find((turn) => turn.id === tree.chosen[at]) ?? all.at(-1);
    if (!next || at === upTo) return found;
    found.push(next);
    at = next.id;
  }
}

/** A dialog's messages, as the server takes them. */
export function messages(turns: readonly Turn[], system: string): object[] {
  const first = system.trim() ? [{ role: "system", content: system }] : [];
  return [...first, ...turns.flatMap(worded)];
}

function worded(turn: Turn): object[] {
  if (turn.role === "tool") {
    return Object.entries(turn.results).map(([id, content]) => ({ role: "tool", tool_call_id: id, content }));
  }
  const calls = turn.calls.filter((call) => isObject(call.arguments));
  if (!calls.length && !turn.text && turn.role === "assistant") return []; // it broke off before its first word
  if (!calls.length) return [{ role: turn.role, content: turn.text }];
  const told = calls.map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } }));
  return [{ role: turn.role, content: turn.text || null, tool_calls: told }];
}

/** Whether a call's arguments are whole: one that broke off cannot be given back to the model. */
export function isObject(text: string): boolean {
  try {
    const value = JSON.parse(text) as unknown;
    return typeof value === "object" && value !== null && !Array.isArray(value);
  } catch {
    return false;
  }
}

/** What one event of a stream tells, of chat completions or of completions. */
export interface Chunk {
  prompt_token_ids?: number[];
  choices: readonly {
    delta?: { content?: string | null; tool_calls?: readonly CallDelta[] };
    text?: string;
    token_ids?: number[];
    prompt_token_ids?: number[];
    logprobs?: ChatLogprobs | CompletionLogprobs | null;
    finish_reason?: string | null;
  }[];
}

interface CallDelta {
  index: number;
  id?: string;
  function?: { name?: string; arguments?: string };
}

interface ChatLogprobs {
  content: readonly { token: string; logprob: number; bytes: readonly number[] }[];
}

interface CompletionLogprobs {
  tokens: readonly string[];
  token_logprobs: readonly number[];
}

/** The answer with what an event adds to it. */
export function grown(turn: Turn, chunk: Chunk): Turn {
  const choice = chunk.choices[0];
  if (!choice) return turn;
  const spelled = spellings(choice.logprobs);
  const tokens = (choice.token_ids ?? []).map((id, i) => ({ id, text: spelled[i]?.[0] ?? "", logprob: spelled[i]?.[1] ?? NaN }));
  return {
    ...turn,
    text: turn.text + (choice.delta?.content ?? choice.text ?? ""),
    calls: (choice.delta?.tool_calls ?? []).reduce(withCall, turn.calls),
    tokens: tokens.length ? [...turn.tokens, ...tokens] : turn.tokens,
    promptIds: chunk.prompt_token_ids ?? choice.prompt_token_ids ?? turn.promptIds,
    reason: choice.finish_reason ?? turn.reason,
  };
}

function spellings(told: ChatLogprobs | CompletionLogprobs | null | undefined): (readonly [string, number])[] {
  if (!told) return [];
  if ("content" in told) return told.content.map((one) => [one.token.includes("\ufffd") ? hex(one.bytes) : one.token, one.logprob]);
  return told.tokens.map((text, i) => [text, told.token_logprobs[i] ?? NaN]);
}

/** The bytes of a token that is no whole character. */
function hex(bytes: readonly number[]): string {
  return bytes.map((byte) => `\\x${byte.toString(16).padStart(2, "0")}`).join("");
}

function withCall(calls: readonly Call[], delta: CallDelta): readonly Call[] {
  const before = calls[delta.index] ?? { id: "", name: "", arguments: "" };
  const call = {
    id: delta.id ?? before.id,
    name: delta.function?.name ?? before.name,
    arguments: before.arguments + (delta.function?.arguments ?? ""),
  };
  return Object.assign([...calls], { [delta.index]: call });
}

/** The tokens that stand before the answer's token of this place, those of the prompt first. */
export function idsBefore(turn: Turn, place: number): [number, ...number[]] {
  return [...turn.promptIds, ...turn.tokens.slice(0, place).map((token) => token.id)] as [number, ...number[]];
}

/** A tree as it was kept: what was still coming then has been left. */
export function restored(kept: Tree): Tree {
  const left = (turn: Turn): Turn =>
    turn.state === "coming" ? { ...turn, state: "unfinished", why: "the page was left while it came" } : turn;
  return { turns: kept.turns.map(left), chosen: kept.chosen };
}
