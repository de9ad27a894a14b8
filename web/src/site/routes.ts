/** What the engine answers, by method and path: the part of the server's routes that needs neither PyTorch nor a second model. */
import { Fields, json, Refused, type Answer } from "./asked";
import type { Pass, Passes } from "./passes";
import { select } from "./select";
import { editedOf, patchesOf } from "./views/edits";
import { attributionOf, headKindsOf, headsAdded, headsOf, lensGridOf, lensOf, neuronsOf } from "./views/layers";
import { nextOf, samplerOf, scoreOf } from "./views/next";
import { neighborsOf, rowsOf, similarityOf, tokensOf, viewOf, wordOf } from "./views/text";
import { costOf, distancesOf, matrixOf, modelOf, pictureOf, ropeOf, weightOf } from "./views/whole";

/** What is asked: a path with its query, and the body of a POST. */
export interface Question {
  readonly method: string;
  readonly path: string;
  readonly body: unknown;
}

/** An open model. */
export interface Opened {
  readonly passes: Passes;
  /** What shows the other views: a command. */
  readonly command: string;
}

type OfModel = (opened: Opened, fields: Fields) => Answer;
type OfPass = (passes: Passes, pass: Pass, fields: Fields) => Answer;

const OF_MODEL: Readonly<Record<string, OfModel>> = {
  "GET /health": () => json({ status: "ready" }),
  "GET /inspect/model": ({ passes, command }, query) => (query.has("shape") ? notOffered(command) : modelOf(passes)),
  "GET /inspect/weights": ({ passes }, query) => weightOf(passes, query),
  "GET /inspect/rows": ({ passes }, query) => rowsOf(passes, query),
  "GET /inspect/rope": ({ passes, command }, query) => (query.has("shape") ? notOffered(command) : ropeOf(passes, query)),
  "POST /inspect/tokens": ({ passes }, body) => json(tokensOf(passes, body)),
  "POST /inspect/word": ({ passes }, body) => json(wordOf(passes, body)),
  "POST /inspect/neighbors": ({ passes }, body) => neighborsOf(passes, body),
  "POST /inspect/similarity": ({ passes }, body) => similarityOf(passes, body),
  "POST /inspect/passes": passOf,
};

const OF_PASS: Readonly<Record<string, OfPass>> = {
  "GET next": nextOf,
  "GET heads": headsOf,
  "GET heads/added": headsAdded,
  "GET head_kinds": headKindsOf,
  "GET neurons": neuronsOf,
  "GET attribution": attributionOf,
  "GET lens": lensOf,
  "GET lens/grid": lensGridOf,
  "GET picture": pictureOf,
  "GET distances": distancesOf,
  "GET score": scoreOf,
  "GET cost": costOf,
  "GET matrix": (passes, _, query) => matrixOf(passes, query),
  "POST sampler": samplerOf,
  "POST edited": editedOf,
  "POST patches": patchesOf,
};

/** Answer a question about an open model; `Refused` where there is no answer. */
export function answer(opened: Opened, { method, path, body }: Question): Answer {
  const [route, query] = path.split("?") as [string, string | undefined];
  const fields = method === "GET" ? Fields.of(new URLSearchParams(query)) : new Fields((body ?? {}) as Record<string, unknown>);
  const ofModel = OF_MODEL[`${method} ${route}`];
  if (ofModel) return ofModel(opened, fields);
  const [, id, what] = /^\/inspect\/passes\/([^/]+)\/(.+)$/.exec(route) ?? [];
  if (id === undefined || what === undefined) return notOffered(opened.command);
  const pass = opened.passes.find(id);
  if (method === "GET" && what.startsWith("activations/")) return select(opened.passes, pass, what.slice("activations/".length), fields);
  const ofPass = OF_PASS[`${method} ${what}`];
  return ofPass ? ofPass(opened.passes, pass, fields) : notOffered(opened.command);
}

function notOffered(command: string): never {
  throw new Refused(404, `This needs Llamarium on your computer: pip install llamarium, then ${command}`, "not_offered");
}

function passOf({ passes, command }: Opened, body: Fields): Answer {
  const experiment = body.value("experiment");
  if (experiment !== undefined && experiment !== null) return notOffered(command);
  if (body.has("adapter")) throw new Refused(404, "no adapter of this name is served; there is: none", "unknown_adapter", "adapter");
  if (body.has("messages")) return notOffered(command);
  const ids = body.has("ids") ? (body.value("ids") as number[]) : passes.model.encode(body.text("text"), { bos: body.bool("add_special_tokens", true) }).ids;
  return json(viewOf(passes, passes.add(ids)));
}
