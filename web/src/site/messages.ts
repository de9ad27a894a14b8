import type { ClassLesson } from "../schema";

/** What the page and the worker say to each other, and the list of models that a site has (`llamarium site` writes it). */

/** A model of the site: `models.json` lists them. */
export interface Entry {
  readonly name: string;
  /** Where its GGUF file is: an address, or a path relative to the site. */
  readonly file: string;
  readonly bytes: number;
  /** The command that opens it on a local server. */
  readonly command: string;
}

/** `models.json`. */
export interface Models {
  readonly models: readonly Entry[];
  /** Other hosts whose files may be opened. */
  readonly origins: readonly string[];
  /** What the site was written with, or null. */
  readonly lesson: ClassLesson | null;
}

/** Open a model: the first message to a worker, which has one model for as long as it lives. */
export interface Open {
  readonly kind: "open";
  /** How many models the page has opened, this one included: names of passes differ between them. */
  readonly instance: number;
  /** The text that the page looks at, as it was asked for; null where there is none yet. Its pass is a part of opening. */
  readonly first: unknown;
  readonly name: string;
  readonly command: string;
  readonly file: string | Blob;
  /** The addresses of the compiled kernels, for one thread and for several. */
  readonly kernels: string;
  readonly sharedKernels: string;
  readonly lesson: ClassLesson | null;
  /** How many threads the page's address asks for. */
  readonly threads: number | undefined;
}

export interface Ask {
  readonly kind: "ask";
  readonly id: number;
  readonly method: string;
  readonly path: string;
  readonly body: unknown;
}

/** Whoever asked does not wait any more. */
export interface Leave {
  readonly kind: "leave";
  readonly id: number;
}

/** An answer, as the parts of a `Response`. */
export interface FromWorker {
  readonly id: number;
  readonly status: number;
  readonly headers: Readonly<Record<string, string>>;
  readonly body: string | ArrayBuffer;
  /** Whether more of the body follows: more messages with this number. */
  readonly goesOn: boolean;
}

/** How the opening of a model goes on. */
export interface Opening {
  readonly kind: "opening";
  readonly name: string;
  readonly state: "loading" | "computing" | "open" | "failed";
  /** 0 to 1. */
  readonly progress: number;
  /** Why it failed. */
  readonly message: string;
  /** Whether it failed because of this browser, so that no other file would help. */
  readonly isFinal: boolean;
}
