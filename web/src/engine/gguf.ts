/**
 * The header of a GGUF file: metadata and a table of tensors. Every count in it may be a lie, so each is compared with the bytes that are
 * left before anything is allocated. The same rules as llamarium/checkpoints/gguf/file.py.
 */
import { EngineError, shown } from "./errors.ts";
import { KINDS, OTHER_KINDS, type Kind } from "./layout.ts";
import type { Reader } from "./source.ts";

export interface Tensor {
  name: string;
  /** (rows, columns), or (count). */
  shape: number[];
  kind: Kind;
  /** From the beginning of the file. */
  offset: number;
  bytes: number;
}

export type Value = string | number | boolean | Value[];

export interface Header {
  metadata: Map<string, Value>;
  /** By name, in the order in which they lie. */
  tensors: Map<string, Tensor>;
  /** The file, of which what has been read is kept. */
  reader: Reader;
}

const MOST_ITEMS = 2 ** 21, MOST_DEPTH = 3, MOST_DIMS = 4, MOST_ALIGNMENT = 2 ** 16;
const FIRST_WINDOW = 2 ** 20, MOST_HEADER = 2 ** 28;
const STRING = 8, ARRAY = 9;
const SIZES: readonly (number | undefined)[] = [1, 1, 2, 2, 4, 4, 4, 1, undefined, undefined, 8, 8, 8];

/** More of the file is needed. */
class Short extends Error {}

class Cursor {
  at = 0;
  where = "the header";
  private items = MOST_ITEMS;
  private readonly view: DataView;
  private readonly text = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

  constructor(readonly name: string, private readonly bytes: Uint8Array, readonly size: number) {
    this.view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  }

  fault(message: string): EngineError {
    return new EngineError("damaged", `${shown(this.name)}: ${this.where}: ${message}; the file is damaged or was cut short`);
  }

  /** Refuse items of at least `least` bytes each that the file cannot hold. */
  charge(count: number, least: number): void {
    const left = this.size - this.at;
    if (!(count * least <= left)) throw this.fault(`${count} items of at least ${least} bytes are announced, ${left} bytes are left`);
    this.items -= count;
    if (this.items < 0) throw this.fault(`more than ${MOST_ITEMS} items; no model's header needs as many`);
  }

  /** Where `count` bytes begin, which are read. */
  take(count: number): number {
    const at = this.at;
    if (at + count > this.size) throw this.fault(`${count} bytes expected at ${at}, the file ends at ${this.size}`);
    if (at + count > this.bytes.length) throw new Short();
    this.at += count;
    return at;
  }

  u32(): number {
    return this.view.getUint32(this.take(4), true);
  }

  u64(): number {
    return Number(this.view.getBigUint64(this.take(8), true)); // beyond 2^53 not exact, and beyond any file
  }

  string(): string {
    const length = this.u64();
    const at = this.take(length);
    try {
      return this.text.decode(this.bytes.subarray(at, at + length));
    } catch {
      throw this.fault("a string is no UTF-8");
    }
  }

  scalar(kind: number): number | boolean {
    const at = this.take(SIZES[kind] ?? 0), view = this.view;
    switch (kind) {
      case 0: return view.getUint8(at);
      case 1: return view.getInt8(at);
      case 2: return view.getUint16(at, true);
      case 3: return view.getInt16(at, true);
      case 4: return view.getUint32(at, true);
      case 5: return view.getInt32(at, true);
      case 6: return view.getFloat32(at, true);
      case 7: {
        const value = view.getUint8(at);
        if (value > 1) throw this.fault("a bool is neither 0 nor 1");
        return value === 1;
      }
      case 10: return Number(view.getBigUint64(at, true));
      case 11: return Number(view.getBigInt64(at, true));
      default: return view.getFloat64(at, true);
    }
  }

  value(kind: number, depth = 0): Value {
    if (kind === STRING) {
      this.charge(1, 8);
      return this.string();
    }
    if (kind !== ARRAY) {
      this.check(kind);
      return this.scalar(kind);
    }
    if (depth === MOST_DEPTH) throw this.fault(`arrays are nested deeper than ${MOST_DEPTH}`);
    const inner = this.u32(), count = this.u64();
    if (inner !== STRING && inner !== ARRAY) this.check(inner);
    this.charge(count, inner === STRING ? 8 : inner === ARRAY ? 12 : SIZES[inner] ?? 1);
    const values: Value[] = [];
    for (let i = 0; i < count; i++) values.push(inner === STRING ? this.string() : inner === ARRAY ? this.value(ARRAY, depth + 1) : this.scalar(inner));
    return values;
  }

  private check(kind: number): void {
    if (SIZES[kind] === undefined) throw this.fault(`value type ${kind}; there are 0 to ${SIZES.length - 1}`);
  }
}

function named(cursor: Cursor, table: string, what: string, others: ReadonlyMap<string, unknown>): string {
  cursor.where = table;
  const name = cursor.string();
  cursor.where = `${what} ${shown(name)}`;
  if (others.has(name)) throw cursor.fault("is there twice");
  return name;
}

function readMetadata(cursor: Cursor, count: number): Map<string, Value> {
  const metadata = new Map<string, Value>();
  cursor.where = "the metadata";
  cursor.charge(count, 13);
  for (let i = 0; i < count; i++) {
    const key = named(cursor, "the metadata", "metadata", metadata);
    metadata.set(key, cursor.value(cursor.u32()));
  }
  return metadata;
}

function alignmentOf(cursor: Cursor, metadata: ReadonlyMap<string, Value>): number {
  const value = metadata.get("general.alignment") ?? 32;
  if (typeof value === "number" && Number.isInteger(value) && value > 0 && value <= MOST_ALIGNMENT && (value & (value - 1)) === 0) return value;
  cursor.where = "metadata general.alignment";
  throw cursor.fault(`is ${shown(value, 40)}; expected a power of two up to ${MOST_ALIGNMENT}`);
}

function kindOf(cursor: Cursor, number: number): Kind {
  const kind = KINDS.find(({ ggml }) => ggml === number);
  if (kind !== undefined) return kind;
  throw new EngineError(
    "unsupported",
    `${shown(cursor.name)}: ${cursor.where} has ggml type ${number} (${OTHER_KINDS[number] ?? "unknown"}); here run ${KINDS.map(({ name }) => name).join(", ")}: convert the file, for example to Q4_K_M or Q8_0`,
  );
}

function readTensors(cursor: Cursor, count: number, alignment: number): Map<string, Tensor> {
  const rows = new Map<string, Tensor>();
  cursor.where = "the tensor table";
  cursor.charge(count, 24);
  for (let i = 0; i < count; i++) {
    const name = named(cursor, "the tensor table", "tensor", rows), dims = cursor.u32();
    if (dims === 0 || dims > MOST_DIMS) throw cursor.fault(`has ${dims} dimensions; expected 1 to ${MOST_DIMS}`);
    const shape = Array.from({ length: dims }, () => cursor.u64()).reverse();
    const kind = kindOf(cursor, cursor.u32()), offset = cursor.u64(), columns = shape[shape.length - 1] ?? 0;
    if (shape.includes(0)) throw cursor.fault(`has shape ${shape.join(" x ")}; expected none of 0`);
    if (columns % kind.block) throw cursor.fault(`rows of ${columns} weights; ${kind.name} has blocks of ${kind.block}`);
    if (offset % alignment) throw cursor.fault(`begins at ${offset}, which is no multiple of the alignment ${alignment}`);
    const bytes = (shape.reduce((a, b) => a * b, 1) / kind.block) * kind.bytes;
    rows.set(name, { name, shape, kind, offset, bytes });
  }
  return rows;
}

/** Put tensors into the order in which they lie, and refuse gaps, overlaps and what the file does not hold. */
function placed(cursor: Cursor, rows: ReadonlyMap<string, Tensor>, alignment: number): Map<string, Tensor> {
  const up = (at: number) => Math.ceil(at / alignment) * alignment, start = up(cursor.at);
  const sorted = [...rows.values()].sort((a, b) => a.offset - b.offset);
  let end = start;
  for (const tensor of sorted) {
    tensor.offset += start;
    cursor.where = `tensor ${shown(tensor.name)}`;
    if (tensor.offset + tensor.bytes > cursor.size) throw cursor.fault(`needs ${tensor.bytes} bytes at ${tensor.offset}; the file ends at ${cursor.size}`);
    if (tensor.offset !== end) throw cursor.fault(`${tensor.offset < end ? "overlaps the tensor before it" : "leaves a gap"}: begins at ${tensor.offset}, expected at ${end}`);
    end = up(tensor.offset + tensor.bytes);
  }
  cursor.where = "the end";
  if (cursor.size > end) throw cursor.fault(`${cursor.size - end} bytes follow the last tensor, which ends at ${end}`);
  return new Map(sorted.map((tensor) => [tensor.name, tensor]));
}

function parse(name: string, bytes: Uint8Array, size: number): Omit<Header, "reader"> {
  const cursor = new Cursor(name, bytes, size);
  const magic = String.fromCharCode(...bytes.subarray(0, 4));
  if (magic !== "GGUF") throw new EngineError("unsupported", `${shown(name)}: is no GGUF file: begins with "${shown(magic)}"; choose a file that ends with .gguf`);
  cursor.at = 4;
  const version = cursor.u32(), numTensors = cursor.u64(), numEntries = cursor.u64();
  if (version !== 2 && version !== 3) {
    const found = version >= 2 ** 16 ? "a big-endian file" : `GGUF version ${version}`;
    throw new EngineError("unsupported", `${shown(name)}: ${found}; read are versions 2 and 3, little-endian: convert the model anew`);
  }
  const metadata = readMetadata(cursor, numEntries), alignment = alignmentOf(cursor, metadata);
  return { metadata, tensors: placed(cursor, readTensors(cursor, numTensors, alignment), alignment) };
}

/** A reader whose first bytes are in memory. */
class Begun implements Reader {
  constructor(private readonly inner: Reader, private readonly first: Uint8Array) {}

  get name(): string {
    return this.inner.name;
  }

  get size(): number {
    return this.inner.size;
  }

  async read(offset: number, length: number): Promise<Uint8Array> {
    if (offset >= this.first.length) return this.inner.read(offset, length);
    if (offset + length <= this.first.length) return this.first.slice(offset, offset + length);
    const out = new Uint8Array(length), known = this.first.length - offset;
    out.set(this.first.subarray(offset));
    out.set(await this.inner.read(this.first.length, length - known), known);
    return out;
  }

  close(): void {
    this.inner.close();
  }
}

/** Read a header, of which more and more is looked at until it is whole. */
export async function readHeader(reader: Reader): Promise<Header> {
  let bytes = new Uint8Array();
  if (reader.size < 24) throw new EngineError("damaged", `${shown(reader.name)}: ${reader.size} bytes; a GGUF file has a header of 24`);
  for (let window = FIRST_WINDOW; window <= MOST_HEADER; window *= 4) {
    const more = Math.min(window, reader.size) - bytes.length, longer = new Uint8Array(bytes.length + more);
    longer.set(bytes);
    longer.set(await reader.read(bytes.length, more), bytes.length);
    bytes = longer;
    try {
      return { ...parse(reader.name, bytes, reader.size), reader: new Begun(reader, bytes) };
    } catch (error) {
      if (!(error instanceof Short)) throw error;
    }
  }
  throw new EngineError("damaged", `${shown(reader.name)}: the header is longer than ${MOST_HEADER} bytes; no model's is`);
}
