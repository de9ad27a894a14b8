/** What answers the page: a server over HTTP, or an engine in a worker of this browser. It is chosen once, at the start. */

/**
 * Answers one request, as `fetch` does: a status, headers and a body, which may come in parts. A failed connection is thrown.
 *
 * `lib/api.ts` has the requests and their types; a backend that does not know a path answers 404 in the server's form.
 */
export type Backend = (path: string, init: RequestInit) => Promise<Response>;

declare global {
  /** Set by a script that runs before the page, as the one of a site without a server does (`web/src/site`). */
  var llamariumBackend: Backend | undefined;
}

/** An event of the window: another model answers from now on. */
export const REPLACED = "llamarium-replaced";

export const send: Backend = (path, init) => (globalThis.llamariumBackend ?? fetch)(path, init);
