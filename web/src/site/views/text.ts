/** From a text to ids; words, and rows of the embedding table. As `page/probes/text.py`. */
import type { Model } from "../../engine/types";
import type { Neighbor, Neighbors, PassView, PieceView, QueryWord, Similarity, TokensView, TokenView } from "../../schema";
import { json, numbers, Refused, type Answer, type Fields } from "../asked";
import type { Pass, Passes } from "../passes";
import { dot, largest, lengthOf, range, row } from "../tensor";

const EMBEDDING = "model.embed_tokens.weight";
const UNEXPLAINED = "the merges are shown by a local server: run `llamarium inspect`";

export function tokenOf(model: Model, id: number): TokenView {
  const bytes = [...model.tokenBytes(id)];
  return { id, text: model.piece(id), bytes, is_special: model.isHidden(id) };
}

export function viewOf({ model }: Passes, { id, ids }: Pass): PassView {
  const { config } = model;
  return {
    id, tokens: ids.map((one) => tokenOf(model, one)), adapter: null, experiment: null,
    runner: runnerOf(model), dtype: dtypeOf(model), kv_dtype: config.kvDtype,
  };
}

export const runnerOf = ({ config: { kernels, threads } }: Model): string => `WebAssembly (${kernels}, ${threads === 1 ? "one thread" : `${threads} threads`})`;

/** What the products of the layers compute in: packed weights as they are packed, all others in float32. */
export function dtypeOf({ config }: Model): string {
  const type = config.weights["model.layers.0.self_attn.q_proj.weight"]?.type ?? "F32";
  return ["F32", "F16", "BF16"].includes(type) ? "float32" : type;
}

export function tokensOf({ model }: Passes, body: Fields): TokensView {
  const text = body.text("text");
  if (body.value("tokenizer") === "llama3") {
    throw new Refused(404, "Llama 3's tokenizer is not part of this site: run `llamarium inspect`", "tokenizer_not_here", "tokenizer");
  }
  const { ids } = model.encode(text, { bos: body.bool("add_special_tokens", true) });
  const isPlain = model.config.tokens === "characters";
  return {
    tokenizer: "model", vocab_size: model.config.vocab, text, utf8: [...new TextEncoder().encode(text)],
    pieces: isPlain ? characters(model, text) : [], tokens: ids.map((id) => tokenOf(model, id)), unexplained: isPlain ? null : UNEXPLAINED,
  };
}

/** Of a vocabulary of characters each is a cut of its own, and nothing is merged. */
function characters(model: Model, text: string): PieceView[] {
  let start = 0;
  return [...text].map((character) => {
    const piece = { text: character, start, merges: [], ids: model.encode(character, { bos: false }).ids };
    start += new TextEncoder().encode(character).length;
    return piece;
  });
}

export const wordOf = ({ model }: Passes, body: Fields): TokenView => tokenOf(model, tokensOfWord(model, body.value("word"))[0] as number);

/** The single tokens that stand for a word, the one with a space before it first; of an id, the id. */
function tokensOfWord(model: Model, word: unknown): number[] {
  if (typeof word === "number") {
    if (Number.isInteger(word) && word >= 0 && word < model.config.vocab) return [word];
    throw new Refused(400, `the token is ${word}; expected an id within 0..${model.config.vocab - 1}`, "invalid_parameter", "word");
  }
  if (typeof word !== "string" || word === "") throw new Refused(400, "the word is empty; expected one with a token of its own", "invalid_parameter", "word");
  const spellings = word.startsWith(" ") ? [word] : [` ${word}`, word];
  const encoded = spellings.map((spelling) => model.encode(spelling, { bos: false }));
  const single = encoded.filter(({ ids }) => ids.length === 1).map(({ ids }) => ids[0] as number);
  if (single.length) return single;
  const pieces = (encoded[0]?.pieces ?? []).map((piece) => JSON.stringify(piece)).join(" + ");
  throw new Refused(400, `${JSON.stringify(word)} is no single token of this vocabulary: ${pieces}; choose a commoner word`, "invalid_parameter", "word");
}

export function rowsOf({ model }: Passes, query: Fields): Answer {
  trained(query);
  const ids = query.text("ids").split(",").map(Number);
  if (ids.some((id) => !Number.isInteger(id) || id < 0 || id >= model.config.vocab)) {
    throw new Refused(400, `an id is outside of the vocabulary, 0 to ${model.config.vocab - 1}`, "invalid_parameter", "ids");
  }
  return numbers({ values: model.rows(EMBEDDING, ids), shape: [ids.length, model.config.hidden], axes: "RD" });
}

/** Rows that were never trained are drawn by PyTorch. */
function trained(fields: Fields): void {
  if (fields.has("random_seed")) throw new Refused(404, "random rows are drawn by a local server: run `llamarium inspect`", "not_offered", "random_seed");
}

function wordsOf(value: unknown): readonly (string | number)[] {
  return Array.isArray(value) ? (value as (string | number)[]) : value === undefined || value === null ? [] : [value as string];
}

function lookUp(model: Model, sign: "+" | "-", word: unknown): QueryWord {
  const id = tokensOfWord(model, word)[0] as number;
  const text = model.piece(id);
  return { sign, word: typeof word === "string" ? word : text, token_id: id, text };
}

/** Rows of the table, a part of it at a time, with their lengths. */
function* tableOf(model: Model): Generator<{ id: number; vector: Float32Array; length: number }> {
  const { vocab, hidden } = model.config;
  const PART = 512;
  for (let start = 0; start < vocab; start += PART) {
    const ids = range(start, Math.min(vocab, start + PART));
    const rows = model.rows(EMBEDDING, ids);
    for (const [i, id] of ids.entries()) {
      const vector = row(rows, i, hidden);
      yield { id, vector, length: Math.max(lengthOf(vector), 1e-12) };
    }
  }
}

export function neighborsOf({ model }: Passes, body: Fields): Answer {
  trained(body);
  const word = body.value("word");
  const [minus, plus] = [wordsOf(body.value("minus")), wordsOf(body.value("plus"))];
  const query = [lookUp(model, "+", word), ...minus.map((one) => lookUp(model, "-", one)), ...plus.map((one) => lookUp(model, "+", one))];
  const excluded = new Set([word, ...minus, ...plus].flatMap((one) => tokensOfWord(model, one)));
  const k = body.whole("k", 10, { least: 1, below: Math.min(101, model.config.vocab - excluded.size + 1) });
  const rows = model.rows(EMBEDDING, query.map((one) => one.token_id));
  const sum = new Float32Array(model.config.hidden);
  query.forEach(({ sign }, i) => row(rows, i, sum.length).forEach((value, d) => (sum[d] = (sum[d] as number) + (sign === "+" ? value : -value))));
  const length = Math.max(lengthOf(sum), 1e-12);
  const cosines = new Float32Array(model.config.vocab).fill(-Infinity);
  for (const one of tableOf(model)) if (!excluded.has(one.id)) cosines[one.id] = dot(one.vector, sum) / length / one.length;
  const neighbors: Neighbor[] = largest(cosines, k).map((id) => ({ token_id: id, text: model.piece(id), cosine: cosines[id] as number }));
  return json({ query, neighbors } satisfies Neighbors);
}

export function similarityOf({ model }: Passes, body: Fields): Answer {
  trained(body);
  const [word, other] = [lookUp(model, "+", body.value("word")), lookUp(model, "+", body.value("other"))];
  const rows = model.rows(EMBEDDING, [word.token_id, other.token_id]);
  const [a, b] = [row(rows, 0, model.config.hidden), row(rows, 1, model.config.hidden)];
  const cosine = dot(a, b) / Math.max(lengthOf(a), 1e-12) / Math.max(lengthOf(b), 1e-12);
  return json({ word, other, cosine } satisfies Similarity);
}
