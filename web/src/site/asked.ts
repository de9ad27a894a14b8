/** A request to the worker, and the answers to it: as the server's, so that the page reads both alike. */
import type { Tensor } from "./tensor";

/** Why there is no answer, in the form of the server's errors. */
export class Refused extends Error {
  constructor(
    readonly status: number,
    message: string,
    readonly code: string | null = null,
    readonly param: string | null = null,
  ) {
    super(message);
  }
}

/** Events that are computed one after the other; null is none yet. `last` is the data of the one behind them. */
export interface Events {
  readonly events: Iterator<unknown> | AsyncIterator<unknown>;
  readonly last: string;
}

/** Numbers in bulk, what travels as JSON, or events. */
export type Answer = { readonly numbers: Tensor; readonly stride?: number } | { readonly json: unknown } | Events;

export const numbers = (tensor: Tensor, stride = 1): Answer => ({ numbers: tensor, stride });
export const json = (value: unknown): Answer => ({ json: value });
export const events = (some: Iterator<unknown>): Answer => ({ events: some, last: '{"type":"end"}' });

interface Bounds {
  least?: number;
  /** Up to this one, which is left out. */
  below?: number;
}

/** The fields of a query or a body, checked as they are read. */
export class Fields {
  constructor(private readonly fields: Readonly<Record<string, unknown>>) {}

  static of(query: URLSearchParams): Fields {
    return new Fields(Object.fromEntries(query));
  }

  has(name: string): boolean {
    return (this.fields[name] ?? undefined) !== undefined;
  }

  text(name: string): string {
    const value = this.fields[name];
    if (typeof value !== "string") throw new Refused(400, `${name} must be a string`, "invalid_parameter", name);
    return value;
  }

  bool(name: string, otherwise: boolean): boolean {
    const value = this.fields[name] ?? otherwise;
    return value === true || value === "true";
  }

  whole(name: string, otherwise?: number, { least = 0, below = 2 ** 31 }: Bounds = {}): number {
    const value = this.has(name) ? Number(this.fields[name]) : otherwise;
    if (value === undefined || !Number.isInteger(value) || value < least || value >= below) {
      throw new Refused(400, `${name} is ${String(value)}; it must be an integer from ${least} to ${below - 1}`, "invalid_parameter", name);
    }
    return value;
  }

  /** As `whole`, or undefined where the field is left out. */
  maybe(name: string, bounds: Bounds = {}): number | undefined {
    return this.has(name) ? this.whole(name, undefined, bounds) : undefined;
  }

  number(name: string, otherwise: number): number {
    const value = this.has(name) ? Number(this.fields[name]) : otherwise;
    if (!Number.isFinite(value)) throw new Refused(400, `${name} must be a finite number`, "invalid_parameter", name);
    return value;
  }

  value(name: string): unknown {
    return this.fields[name];
  }
}
