/** The vocabulary inside a GGUF file: byte-level BPE, SentencePiece, words, or characters. */
import type { Metadata } from "../config.ts";
import { EngineError, shown } from "../errors.ts";
import type { EncodeOptions } from "../types.ts";
import { ByteLevelBPE } from "./bpe.ts";
import { bytesOf, fromUtf8, pieceOf, utf8 } from "./bytes.ts";
import { findCutter, type Cutter } from "./cutters.ts";
import { SentencePiece } from "./sentencepiece.ts";
import { findSpecialTokens, splitSpellings, type SpecialTokens, type TypedToken } from "./special.ts";
import { UNKNOWN as UNKNOWN_WORD, Words } from "./words.ts";

const KEY = "tokenizer.ggml.";
const NORMAL = 1, UNKNOWN = 2, CONTROL = 3, USER_DEFINED = 4, UNUSED = 5;

interface Backend {
  encode(text: string): number[];
  bytes(id: number): Uint8Array | null;
}

/** Ids that a file names, or null. */
export interface Named {
  bos: number | null;
  eos: number | null;
  pad: number | null;
}

export type TokenKind = "characters" | "bpe" | "sentencepiece" | "words";

interface Parts {
  kind: TokenKind;
  backend: Backend;
  count: number;
  special: SpecialTokens;
  named: Named;
  addBos: boolean;
  /** Whether encoding puts a space before a text, which decoding takes away. */
  hasPrefix: boolean;
}

export class Tokenizer {
  readonly kind: TokenKind;
  readonly named: Named;
  readonly hasPrefix: boolean;
  private readonly backend: Backend;
  private readonly count: number;
  private readonly special: SpecialTokens;
  private readonly addBos: boolean;

  constructor({ kind, backend, count, special, named, addBos, hasPrefix }: Parts) {
    this.kind = kind;
    this.named = named;
    this.hasPrefix = hasPrefix;
    this.backend = backend;
    this.count = count;
    this.special = special;
    this.addBos = addBos;
    this.hidden = new Set([...special.ids.values()].filter((id) => !special.visible.has(id)));
  }

  private readonly hidden: ReadonlySet<number>;

  get ends(): readonly number[] {
    return this.special.ends;
  }

  get control(): ReadonlyMap<string, number> {
    return this.special.ids;
  }

  encodeParts(parts: readonly (string | number)[]): number[] {
    return parts.flatMap((part) => (typeof part === "number" ? [part] : this.part(part)));
  }

  encode(text: string, { bos = true, special = false }: EncodeOptions): number[] {
    const ids = special
      ? splitSpellings(text, this.special.ids.keys()).flatMap((part, i) => (i % 2 ? [this.special.ids.get(part) as number] : this.part(part)))
      : this.part(text);
    return bos && this.addBos && this.named.bos !== null && ids[0] !== this.named.bos ? [this.named.bos, ...ids] : ids;
  }

  decode(ids: readonly number[], special: boolean): string {
    const parts = ids.map((id) => (special || !this.hidden.has(id) ? this.bytes(id) : null) ?? new Uint8Array());
    const joined = new Uint8Array(parts.reduce((sum, { length }) => sum + length, 0));
    parts.reduce((at, part) => (joined.set(part, at), at + part.length), 0);
    const text = fromUtf8(joined);
    return this.hasPrefix ? text.replace(/^ /, "") : text;
  }

  /** Whether an answer does not show a token. */
  isHidden(id: number): boolean {
    return this.hidden.has(id);
  }

  bytes(id: number): Uint8Array | null {
    return id < this.count ? this.backend.bytes(id) : null;
  }

  piece(id: number): string {
    const bytes = this.bytes(id);
    return bytes === null ? `<${id}>` : pieceOf(bytes);
  }

  private part(text: string): number[] {
    if (/\p{Surrogate}/u.test(text)) throw new EngineError("input", "the text holds half of a surrogate pair, which is no character; leave it out");
    try {
      return this.backend.encode(text);
    } catch (error) {
      if (error instanceof EngineError) throw error;
      throw new EngineError("input", `a text of ${text.length} characters cannot be cut into pieces: ${shown(error)}; use a shorter one`);
    }
  }
}

/** What of a file is an array of one type. */
function list<T extends string | number>(metadata: Metadata, name: string, type: "string" | "number"): T[] {
  const value = metadata.get(KEY + name);
  if (!Array.isArray(value) || value.some((item) => typeof item !== type)) throw metadata.fault(KEY + name, `an array of ${type}s`);
  return value as T[];
}

function tokensOf(metadata: Metadata, rows: number): { tokens: string[]; types: number[] } {
  const tokens = list<string>(metadata, "tokens", "string");
  const types = metadata.get(`${KEY}token_type`) === undefined ? tokens.map(() => NORMAL) : list<number>(metadata, "token_type", "number");
  if (tokens.length === 0 || tokens.length > rows || types.length !== tokens.length) {
    throw new EngineError("damaged", `${shown(metadata.source)}: ${tokens.length} tokens, ${types.length} token types and ${rows} rows of embeddings; expected as many`);
  }
  return { tokens, types };
}

function cutterOf(metadata: Metadata): Cutter {
  const name = metadata.text(`${KEY}pre`), found = name === null ? undefined : findCutter(name);
  if (found === null) throw metadata.unsupported(`${KEY}pre is ${shown(name)}, of models of another family`);
  if (found !== undefined) return found;
  metadata.warnings.push(`${KEY}pre ${name === null ? "is missing" : `is ${shown(name)}, which is not known`}; texts are cut as llama.cpp's default does`);
  return findCutter("default") as Cutter;
}

/** The id that the file names, or null. */
function namedId(metadata: Metadata, name: string, count: number): number | null {
  const key = `${KEY}${name}_token_id`;
  if (metadata.get(key) === undefined) return null;
  const id = metadata.integer(key);
  if (id < 0 || id >= count) throw metadata.fault(key, `an id of 0 to ${count - 1}`);
  return id;
}

/** The control tokens of a vocabulary that has a type for each token. */
interface Control {
  typed: TypedToken[];
  special: SpecialTokens;
  named: Named;
  addBos: boolean;
}

function controlOf(metadata: Metadata, tokens: string[], types: number[], usualBos: boolean, usual: Partial<Named> = {}): Control {
  const [bos, eos, pad, eot, eom] = ["bos", "eos", "padding", "eot", "eom"].map((name) => (
    namedId(metadata, name, tokens.length) ?? usual[name as keyof Named] ?? null
  )) as [number | null, number | null, number | null, number | null, number | null];
  const ids = [bos, eos, pad, eot, eom].filter((id): id is number => id !== null);
  const typed = types.flatMap((type, id): TypedToken[] => {
    const isFlagged = type === UNKNOWN || type === CONTROL || ids.includes(id);
    return (isFlagged || type === USER_DEFINED) && tokens[id] ? [{ spelling: tokens[id], id, isFlagged }] : [];
  });
  const ends = [eos, eot, eom].filter((id): id is number => id !== null);
  const special = findSpecialTokens(typed, metadata.text("tokenizer.chat_template"), [bos, pad, ...ends].filter((id): id is number => id !== null), ends);
  const addBos = metadata.get(`${KEY}add_bos_token`) ?? usualBos;
  if (typeof addBos !== "boolean") throw metadata.fault(`${KEY}add_bos_token`, "true or false");
  if (addBos && bos === null) throw metadata.fault(`${KEY}bos_token_id`, "an id, as a text begins with it");
  return { typed, special, named: { bos, eos, pad }, addBos };
}

/** A token's id by its spelling. */
function idsOf(metadata: Metadata, tokens: string[]): Map<string, number> {
  const ids = new Map(tokens.map((token, i) => [token, i])), twice = tokens.find((token, i) => token !== "" && ids.get(token) !== i);
  if (twice === undefined) return ids;
  throw new EngineError("damaged", `${shown(metadata.source)}: ${KEY}tokens holds "${shown(twice)}" twice`);
}

function byteLevel(metadata: Metadata, tokens: string[], types: number[]): Tokenizer {
  const cutter = cutterOf(metadata), ids = idsOf(metadata, tokens), { typed, ...control } = controlOf(metadata, tokens, types, cutter.addBos);
  const bpe = new ByteLevelBPE(ids, list<string>(metadata, "merges", "string"), cutter, shown(metadata.source));
  const plain = new Map(typed.filter(({ spelling, id }) => types[id] === USER_DEFINED && !control.special.ids.has(spelling)).map(({ spelling, id }) => [spelling, id]));
  const added = new Map(typed.map(({ spelling, id }) => [id, utf8(spelling)]));
  const backend: Backend = {
    encode: (text) => splitSpellings(text, plain.keys()).flatMap((part, i) => (i % 2 ? [plain.get(part) as number] : bpe.encode(part))),
    bytes: (id) => added.get(id) ?? bytesOf(tokens[id] ?? "") ?? utf8(tokens[id] ?? ""),
  };
  return new Tokenizer({ kind: "bpe", backend, count: tokens.length, hasPrefix: false, ...control });
}

function flag(metadata: Metadata, name: string, usual: boolean): boolean {
  const value = metadata.get(KEY + name) ?? usual;
  if (typeof value !== "boolean") throw metadata.fault(KEY + name, "true or false");
  return value;
}

function sentencePiece(metadata: Metadata, tokens: string[], types: number[]): Tokenizer {
  idsOf(metadata, tokens);
  const { typed: _, ...control } = controlOf(metadata, tokens, types, true, { bos: 1, eos: 2 });
  const scores = metadata.get(`${KEY}scores`) === undefined ? tokens.map(() => 0) : list<number>(metadata, "scores", "number");
  if (scores.length < tokens.length) throw metadata.fault(`${KEY}scores`, `${tokens.length} numbers`);
  if (flag(metadata, "remove_extra_whitespaces", false)) throw metadata.unsupported(`${KEY}remove_extra_whitespaces is true; texts are read with all their spaces here`);
  const hasPrefix = flag(metadata, "add_space_prefix", true), pieces = tokens.map((token, id) => token || `[EMPTY_${id}]`);
  const found = new SentencePiece({ pieces, types, scores, control: new Set(control.special.ids.values()), hasPrefix });
  const backend: Backend = { encode: (text) => found.encode(text), bytes: (id) => found.bytesOf(id) };
  return new Tokenizer({ kind: "sentencepiece", backend, count: tokens.length, hasPrefix, ...control });
}

const ESCAPES: Readonly<Record<string, string>> = { n: "\n", r: "\r", t: "\t" };

/** Characters, or words: of both the longest token that matches is taken. */
function longestMatch(metadata: Metadata, tokens: string[], types: number[]): Tokenizer {
  const unescaped = tokens.map((token) => token.replace(/\\(x[0-9a-f]{2}|[\s\S])/gu, (_, code: string) => (
    code.length === 3 ? String.fromCharCode(parseInt(code.slice(1), 16)) : ESCAPES[code] ?? code
  )));
  const texts = unescaped.filter((_, i) => types[i] !== UNUSED), ids = new Map(texts.map((text, i) => [text, i]));
  const plain = { special: { ids: new Map(), visible: new Set<number>(), ends: [] }, named: { bos: null, eos: null, pad: null }, addBos: false };
  if (metadata.get(`${KEY}add_space_prefix`) === true && texts[0] === UNKNOWN_WORD && texts[1] === " ") {
    const words = new Words(texts), backend: Backend = { encode: (text) => words.encode(text), bytes: (id) => words.bytesOf(id) };
    return new Tokenizer({ kind: "words", backend, count: texts.length, hasPrefix: true, ...plain });
  }
  if (ids.size !== texts.length || texts.some((text) => [...text].length !== 1)) {
    throw metadata.unsupported(`${KEY}model is rwkv, and its tokens are neither characters nor words of \`llamarium train-tokenizer\``);
  }
  const backend: Backend = {
    encode: (text) => Array.from(text, (character) => {
      const id = ids.get(character);
      if (id !== undefined) return id;
      const code = (character.codePointAt(0) ?? 0).toString(16).toUpperCase().padStart(4, "0");
      throw new EngineError("input", `the character "${shown(character)}" (U+${code}) is not among the ${texts.length} that this model knows`);
    }),
    bytes: (id) => utf8(texts[id] ?? ""),
  };
  return new Tokenizer({ kind: "characters", backend, count: texts.length, hasPrefix: false, ...plain });
}

/** Read the vocabulary of a file whose embeddings have so many rows. */
export function readTokenizer(metadata: Metadata, rows: number): Tokenizer {
  const model = metadata.get(`${KEY}model`);
  const read = { gpt2: byteLevel, llama: sentencePiece, rwkv: longestMatch }[String(model)];
  if (read === undefined) {
    throw metadata.unsupported(`${KEY}model is ${shown(model)}; read here are byte-level BPE ("gpt2"), SentencePiece ("llama"), characters and words ("rwkv")`);
  }
  const { tokens, types } = tokensOf(metadata, rows);
  return read(metadata, tokens, types);
}
