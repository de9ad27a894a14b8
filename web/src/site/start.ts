/** Starts the engine in a worker, and sets it as what the page asks. The site's index.html runs it before the page. */
import { threadsFor } from "../engine/threads";
import { REPLACED, type Backend } from "../lib/backend";
import { Answers } from "./answers";
import { Choice, offerThreads } from "./choice";
import type { Entry, Models, Opening } from "./messages";
import { Workers } from "./workers";
import "./site.css";

const site = new URL("..", import.meta.url); // this script is in a folder of the site
const at = (path: string): string => new URL(path, site).href;
const beside = (name: string): string => new URL(/* @vite-ignore */ name, import.meta.url).href;

let line: Choice | undefined;
let isFirst = true;

const answers = new Answers();
const newWorker = (): Worker => new Worker(new URL(/* @vite-ignore */ "./worker.js", import.meta.url), { type: "module" });
const workers = new Workers(answers, newWorker, show);

const ask: Backend = (path, init) => answers.ask(path, init);
globalThis.llamariumBackend = ask;

/** How many threads the address asks for. */
const threads = Number(new URLSearchParams(location.search).get("threads")) || undefined;
/** Whether the service worker has answered this page, and with it the headers that threads need. */
const isFirstVisit = "serviceWorker" in navigator && navigator.serviceWorker.controller === null;

/** The view that opens where the address names none: it stands in this script's own address. */
const stage = new URL(import.meta.url).searchParams.get("stage");
if (stage !== null && !location.hash) history.replaceState(null, "", `#stage=${stage}`);

let lesson: Models["lesson"] = null;

function open(entry: Entry, file: string | Blob): void {
  const { name, command } = entry;
  workers.open({ name, command, file, kernels: beside("kernels.wasm"), sharedKernels: beside("kernels-threads.wasm"), threads, lesson });
}

/** Say how an opening goes on; the page asks again when another model answers. */
function show(opening: Opening, nowOpen: string): void {
  if (opening.state === "open" && !isFirst) dispatchEvent(new Event(REPLACED));
  line?.show(opening, nowOpen);
  if (opening.state === "open" || opening.state === "failed") isFirst = false;
}

/** A file of another host, if the site allows its origin. */
function elsewhere(address: string, origins: readonly string[]): Entry | undefined {
  if (!origins.some((origin) => address.startsWith(`${origin}/`))) return undefined;
  const name = (new URL(address).pathname.split("/").at(-1) ?? "").replace(/\.gguf$/, "");
  return { name, file: address, bytes: 0, command: `llamarium inspect -m ${name}.gguf` };
}

async function begin(): Promise<void> {
  const answer = await fetch(at("models.json"));
  if (!answer.ok) throw new Error(`models.json: the server answers ${answer.status}`);
  const told = (await answer.json()) as Models, { models, origins } = told;
  lesson = told.lesson;
  const wanted = new URLSearchParams(location.search).get("model") ?? "";
  const entry = models.find(({ name }) => name === wanted) ?? elsewhere(wanted, origins) ?? (models[0] as Entry);
  line = new Choice(models, entry, {
    open: (file) => open({ name: file.name.replace(/\.gguf$/, ""), file: "", bytes: file.size, command: `llamarium inspect -m ${file.name}` }, file),
    cancel: () => workers.cancel(),
  });
  const { element } = line;
  document.body.append(element);
  open(entry, at(entry.file));
  const count = threadsFor({ isIsolated: true, processors: navigator.hardwareConcurrency, wanted: threads });
  if (isFirstVisit && !crossOriginIsolated && count > 1) void navigator.serviceWorker.ready.then(() => offerThreads(element, count));
}

begin().catch((error: unknown) => {
  answers.fail(`the list of models cannot be read (${(error as Error).message}); reload the page, or tell whoever published it`);
});
if ("serviceWorker" in navigator) navigator.serviceWorker.register(at("offline.js")).catch(() => undefined); // without it the page needs the network
