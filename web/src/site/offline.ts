/** The site's service worker: what was loaded once is there without a network. `files.json` lists the site, under a version of its own. */

interface Files {
  readonly version: string;
  readonly files: readonly string[];
}

/** The few parts of a service worker's scope that are used here; the page's types are those of a window. */
interface Scope {
  readonly registration: { readonly scope: string };
  readonly clients: { claim(): Promise<void> };
  skipWaiting(): Promise<void>;
  addEventListener(type: "install" | "activate", take: (event: { waitUntil(work: Promise<unknown>): void }) => void): void;
  addEventListener(type: "fetch", take: (event: { readonly request: Request; respondWith(answer: Promise<Response>): void }) => void): void;
}

const scope = self as unknown as Scope;
const PREFIX = "llamarium-site";
const at = (path: string): string => new URL(path, scope.registration.scope).href;
/** Caches of this site; another one of the same host has its own. */
const mine = (name: string): boolean => name.startsWith(`${PREFIX} ${scope.registration.scope} `);

async function install(): Promise<void> {
  const { version, files } = (await (await fetch(at("files.json"), { cache: "no-cache" })).json()) as Files;
  const name = `${PREFIX} ${scope.registration.scope} ${version}`;
  await (await caches.open(name)).addAll(files.map(at));
  for (const one of await caches.keys()) if (mine(one) && one !== name) await caches.delete(one);
  await scope.skipWaiting();
}

/** From the network while there is one for the pages, whose names stay; all else from the cache first. */
async function answer(request: Request): Promise<Response> {
  const isPage = request.mode === "navigate" || /\/(models|files)\.json$/.test(new URL(request.url).pathname);
  if (isPage) return await fetch(request).catch(async () => (await cached(request)) ?? Response.error());
  return (await cached(request)) ?? (await fetch(request));
}

/**
 * Pages and workers with the headers that say that nothing of another host is in them. Only then do browsers share memory between workers,
 * so that several threads compute; many hosts of plain files cannot send them.
 */
function isolated({ destination }: Request, answer: Response): Response {
  if (!answer.ok || !["document", "iframe", "frame", "worker"].includes(destination)) return answer;
  const headers = new Headers(answer.headers);
  headers.set("cross-origin-opener-policy", "same-origin");
  headers.set("cross-origin-embedder-policy", "require-corp");
  return new Response(answer.body, { status: answer.status, statusText: answer.statusText, headers });
}

async function cached(request: Request): Promise<Response | undefined> {
  const address = request.mode === "navigate" ? scope.registration.scope : request.url.replace(/[?#].*/, "");
  const found = await caches.match(address);
  const range = /^bytes=(\d+)-(\d*)$/.exec(request.headers.get("range") ?? "");
  return found && range ? part(await found.blob(), Number(range[1]), range[2] ? Number(range[2]) + 1 : undefined) : found;
}

/** A cached file answers a request for a range of its bytes, too. */
function part(whole: Blob, start: number, stop = whole.size): Response {
  const end = Math.min(stop, whole.size);
  const headers = { "content-range": `bytes ${start}-${end - 1}/${whole.size}`, "content-length": String(end - start), "accept-ranges": "bytes" };
  return start < end ? new Response(whole.slice(start, end), { status: 206, headers }) : new Response(null, { status: 416, headers: { "content-range": `bytes */${whole.size}` } });
}

scope.addEventListener("install", (event) => event.waitUntil(install()));
scope.addEventListener("activate", (event) => event.waitUntil(scope.clients.claim()));
scope.addEventListener("fetch", (event) => {
  const { request } = event;
  if (request.method === "GET" && request.url.startsWith(scope.registration.scope)) event.respondWith(answer(request).then((told) => isolated(request, told)));
});
