/** Answers to dialogs, and texts that go on, token by token. As `/v1/chat/completions` and `/v1/completions` stream them. */
import type { Model } from "../../engine/types";
import { Refused, type Fields } from "../asked";
import type { Passes } from "../passes";
import { penaltiesOf } from "../views/next";
import { logSoftmax } from "../tensor";
import type { ChatTemplate, Message } from "./template";

const PART = 64; // tokens of a prompt that are run at once: whoever leaves waits no longer
const USUAL_LENGTH = 16; // of a text that goes on, as OpenAI's

interface Token {
  id: number;
  /** The characters that are complete with it. */
  text: string;
  /** Of the model alone. */
  logprob: number;
  reason: "stop" | "length" | null;
}

/** How tokens are told. */
interface Form {
  first(prompt: readonly number[]): object;
  token(model: Model, token: Token): object;
}

const choice = (fields: object, reason: string | null = null): object => ({ index: 0, ...fields, finish_reason: reason });

const spelled = (model: Model, id: number): string => new TextDecoder("utf-8", { ignoreBOM: true }).decode(model.tokenBytes(id));

const DIALOG: Form = {
  first: (prompt) => ({ choices: [choice({ delta: { role: "assistant", content: "" } })], prompt_token_ids: prompt }),
  token: (model, { id, text, logprob, reason }) => ({
    choices: [choice({
      delta: { content: text }, token_ids: [id],
      logprobs: { content: [{ token: spelled(model, id), logprob, bytes: [...model.tokenBytes(id)], top_logprobs: [] }] },
    }, reason)],
  }),
};

const TEXT: Form = {
  first: (prompt) => ({ choices: [choice({ text: "", token_ids: [], prompt_token_ids: prompt })] }),
  token: (model, { id, text, logprob, reason }) => ({
    choices: [choice({ text, token_ids: [id], logprobs: { tokens: [spelled(model, id)], token_logprobs: [logprob] } }, reason)],
  }),
};

/** Answer a dialog. */
export async function* chatOf(passes: Passes, chat: ChatTemplate | null, body: Fields, command: string): AsyncGenerator<unknown> {
  if (!chat) throw new Refused(400, "this model has no chat template; continue a text instead, or open another model", "chat_format", "messages");
  const prompt = await chat.encode(messagesOf(body, command));
  yield* told(passes, prompt, await chat.ends(), body, DIALOG, { field: "messages", command });
}

/** Go on with a text. */
export async function* completionOf(passes: Passes, chat: ChatTemplate | null, body: Fields, command: string): AsyncGenerator<unknown> {
  const { ids } = passes.model.encode(body.text("prompt"));
  yield* told(passes, ids, (await chat?.ends()) ?? [], body, TEXT, { field: "prompt", command });
}

function messagesOf(body: Fields, command: string): Message[] {
  const messages = body.value("messages");
  if (!Array.isArray(messages) || messages.length === 0) throw new Refused(400, "messages must be a list of at least one message", "invalid_parameter", "messages");
  return messages.map((one: { role?: unknown; content?: unknown; tool_calls?: unknown }, i) => {
    if (one.role === "tool" || one.tool_calls !== undefined) throw notOffered("tool calls", command, "messages");
    if (typeof one.role === "string" && typeof one.content === "string") return { role: one.role, content: one.content };
    throw new Refused(400, `messages[${i}] must have a role and a content, both strings`, "invalid_parameter", "messages");
  });
}

function notOffered(what: string, command: string, field: string): Refused {
  return new Refused(404, `${what} need Llamarium on your computer: pip install llamarium, then ${command}`, "not_offered", field);
}

interface Named {
  field: string;
  command: string;
}

/** Each step as an event of the chat; null while there is nothing to report. */
async function* told(passes: Passes, prompt: readonly number[], ends: readonly number[], body: Fields, form: Form, { field, command }: Named): AsyncGenerator<unknown> {
  for (const name of ["tools", "response_format"]) if (body.has(name)) throw notOffered("tools and JSON schemas", command, name);
  if (body.has("model")) throw new Refused(404, "this site has no adapters; leave out model", "unknown_adapter", "model");
  const { model, config } = passes, room = config.context - prompt.length;
  if (prompt.length === 0) throw new Refused(400, "the text is empty; at least one token is required", "invalid_parameter", field);
  if (room < 1) {
    throw new Refused(400, `the prompt has ${prompt.length} tokens, and the context length is ${config.context}: start a new conversation, or use a shorter text`, "context_length_exceeded", field);
  }
  const most = Math.min(body.maybe("max_tokens", { least: 1 }) ?? (form === DIALOG ? room : USUAL_LENGTH), room);
  for (let stop = PART; stop < prompt.length; stop += PART) {
    passes.fill(prompt, stop);
    yield null;
  }
  yield form.first(prompt);
  const strips = form === DIALOG && config.hasPrefix; // an answer is a text of its own
  for (const token of tokensOf(passes, { prompt, ends: new Set([...config.endIds, ...ends]), most, strips }, body)) yield form.token(model, token);
}

interface Wanted {
  prompt: readonly number[];
  ends: ReadonlySet<number>;
  /** Tokens. */
  most: number;
  /** Whether the space before the answer is left out. */
  strips: boolean;
}

function* tokensOf(passes: Passes, { prompt, ends, most, strips }: Wanted, body: Fields): Generator<Token> {
  const { model } = passes, ids = [...prompt], text = new TextDecoder("utf-8", { ignoreBOM: true });
  const seed = body.whole("seed", Math.floor(Math.random() * 2 ** 32), { below: 2 ** 53 });
  const sampling = { temperature: body.number("temperature", 1), topP: body.number("top_p", 1), topK: body.whole("top_k", 0), minP: body.number("min_p", 0), seed };
  for (let step = 0; step < most; step++) {
    const logits = passes.logits({ ids }, ids.length - 1, ids.length);
    const id = model.sample(penaltiesOf(logits, body, ids, prompt.length), { ...sampling, step });
    ids.push(id);
    const isEnd = ends.has(id), reason = isEnd ? "stop" : step + 1 === most ? "length" : null;
    const isShown = !isEnd && !model.isHidden(id);
    let shown = text.decode(isShown ? model.tokenBytes(id) : new Uint8Array(), { stream: reason === null });
    if (strips && shown) [shown, strips] = [shown.replace(/^ /, ""), false];
    yield { id, text: shown, logprob: logSoftmax(logits)[id] as number, reason };
    if (isEnd) return;
  }
}
