import { EngineError, shown } from "./errors.ts";
import type { Source } from "./types.ts";

/** The bytes of a file, read from front to back: a read begins at or behind the end of the one before. */
export interface Reader {
  readonly name: string;
  /** In bytes. */
  readonly size: number;
  /** Exactly these bytes, until the next read; EngineError "damaged" where the file ends before. */
  read(offset: number, length: number): Promise<Uint8Array>;
  close(): void;
}

/** What a file gives next: bytes from `begin` on, which is `offset`, or before it where it can only be read on. */
type Next = (offset: number, length: number) => Promise<{ begin: number; bytes: Uint8Array }>;

const WINDOW = 2 ** 23; // bytes that are read at a time
const TRIES = 3;

/** Reads through a window that moves over the file. */
class Windowed implements Reader {
  private begin = 0;
  private window: Uint8Array = new Uint8Array();

  constructor(readonly name: string, readonly size: number, private readonly next: Next, readonly close: () => void = () => undefined) {}

  async read(offset: number, length: number): Promise<Uint8Array> {
    if (offset + length > this.size) throw ended(this.name, this.size, offset + length);
    const within = offset - this.begin;
    if (within >= 0 && within + length <= this.window.length) return this.window.subarray(within, within + length);
    const out = new Uint8Array(length);
    for (let filled = 0; filled < length;) {
      const at = offset + filled - this.begin;
      const part = at < 0 ? new Uint8Array() : this.window.subarray(at, at + length - filled);
      out.set(part, filled);
      filled += part.length;
      if (part.length > 0) continue;
      const { begin, bytes } = await this.next(offset + filled, Math.max(Math.min(WINDOW, this.size - offset - filled), length - filled));
      if (bytes.length === 0 || begin > offset + filled) throw ended(this.name, begin, offset + length);
      this.begin = begin;
      this.window = bytes;
    }
    return out;
  }
}

function ended(name: string, size: number, expected: number): EngineError {
  return new EngineError("damaged", `${shown(name)}: ends after ${size} bytes, at least ${expected} were expected; the file was cut short`);
}

function inMemory(buffer: ArrayBuffer, name: string): Reader {
  const bytes = new Uint8Array(buffer);
  return new Windowed(name, bytes.length, () => Promise.resolve({ begin: 0, bytes }));
}

function ofBlob(blob: Blob, name: string): Reader {
  return new Windowed(name, blob.size, async (begin, length) => {
    const buffer = await blob.slice(begin, begin + length).arrayBuffer().catch((error: unknown) => {
      throw new EngineError("damaged", `${shown(name)}: cannot be read: ${shown(error)}; choose the file again`);
    });
    return { begin, bytes: new Uint8Array(buffer) };
  });
}

// --- addresses --------------------------------------------------------------------------------------------------------

function failed(url: URL, name: string, error: unknown): EngineError {
  const isElsewhere = globalThis.location !== undefined && url.origin !== location.origin;
  const check = isElsewhere ? "the address, and that its server allows this page (CORS)" : "the connection";
  return new EngineError("network", `${shown(name)}: cannot be read: ${shown(error)}; check ${check}`);
}

const rangeOf = (offset: number, length: number): string => `bytes=${offset}-${offset + length - 1}`;

/** Whether the same request may succeed later. */
const isPassing = (status: number): boolean => status >= 500 || status === 408 || status === 429;

function adviceOn(status: number): string {
  if (isPassing(status)) return "try again later";
  if (status === 401 || status === 403) return "it does not give access; the file must be public";
  return "it does not have this file; check the address";
}

/** Ask for a range, or for the whole file, some times where the server fails. */
async function request(url: URL, name: string, range: string | null): Promise<Response> {
  const init: RequestInit = range === null ? {} : { headers: { Range: range } };
  for (let tries = 1; ; tries++) {
    let problem: EngineError;
    try {
      const answer = await fetch(url, init);
      if (answer.ok) return answer;
      problem = new EngineError("network", `${shown(name)}: the server answers ${answer.status}: ${adviceOn(answer.status)}`);
      if (!isPassing(answer.status)) throw problem;
    } catch (error) {
      if (error instanceof EngineError) throw error;
      problem = failed(url, name, error);
    }
    if (tries === TRIES) throw problem;
    await new Promise((resume) => setTimeout(resume, 300 * tries));
  }
}

async function bodyOf(answer: Response, url: URL, name: string): Promise<ArrayBuffer> {
  return answer.arrayBuffer().catch((error: unknown) => {
    throw failed(url, name, error);
  });
}

/** A file in ranges. */
function ofRanges(url: URL, name: string, size: number, first: ArrayBuffer): Reader {
  let kept: ArrayBuffer | null = first;
  return new Windowed(name, size, async (begin, length) => {
    if (begin === 0 && kept !== null) {
      const bytes = new Uint8Array(kept);
      kept = null;
      return { begin, bytes };
    }
    const answer = await request(url, name, rangeOf(begin, length));
    if (answer.status !== 206) throw new EngineError("network", `${shown(name)}: the server answers ${answer.status} to a range; try again`);
    return { begin, bytes: new Uint8Array(await bodyOf(answer, url, name)) };
  });
}

/** A file as one stream, of a server that has no ranges. */
function ofStream(stream: ReadableStreamDefaultReader<Uint8Array>, url: URL, name: string, size: number): Reader {
  let at = 0;
  const next: Next = async () => {
    const { value } = await stream.read().catch((error: unknown) => {
      throw failed(url, name, error);
    });
    const begin = at, bytes = value ?? new Uint8Array();
    at += bytes.length;
    return { begin, bytes };
  };
  return new Windowed(name, size, next, () => void stream.cancel().catch(() => undefined));
}

async function ofAddress(url: URL, name: string): Promise<Reader> {
  let answer = await request(url, name, rangeOf(0, WINDOW));
  const size = /\/(\d+)$/.exec(answer.headers.get("Content-Range") ?? "")?.[1];
  if (answer.status === 206 && size !== undefined) return ofRanges(url, name, Number(size), await bodyOf(answer, url, name));
  if (answer.status === 206) {
    void answer.body?.cancel().catch(() => undefined); // `Content-Range` is hidden from pages of other origins
    answer = await request(url, name, null);
  }
  const said = Number(answer.headers.get("Content-Length") ?? "");
  const isPacked = answer.headers.has("Content-Encoding"); // then the length is that of what is packed
  if (answer.status === 200 && said > 0 && !isPacked && answer.body !== null) return ofStream(answer.body.getReader(), url, name, said);
  return inMemory(await bodyOf(answer, url, name), name); // the server does not say its length
}

/** Open what holds a model. */
export async function openSource(source: Source, given: string | undefined): Promise<Reader> {
  if (source instanceof URL) return ofAddress(source, given ?? (source.pathname.split("/").pop() || source.href));
  if (source instanceof ArrayBuffer) return inMemory(source, given ?? "the model");
  return ofBlob(source, given ?? (source instanceof File ? source.name : "the model"));
}
