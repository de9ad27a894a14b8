/** What the engine answers, by method and path: the part of the server's routes that needs neither PyTorch nor a second model. */
import type { ClassLesson, OfModel, OfPass } from "../schema";
import { Fields, json, Refused, type Answer } from "./asked";
import { chatOf, completionOf } from "./chat/answers";
import type { ChatTemplate } from "./chat/template";
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
  /** How its dialogs are written; null where it has none. */
  readonly chat: ChatTemplate | null;
  /** The site's, or null. */
  readonly lesson: ClassLesson | null;
}

type AskModel = (opened: Opened, fields: Fields) => Answer;
type AskPass = (passes: Passes, pass: Pass, fields: Fields) => Answer;

/** Of the server's probes those that are computed here; their names, queries and answers are the server's. */
const OF_MODEL: { readonly [N in keyof OfModel]?: AskModel } = {
  model: ({ passes, command, lesson }, query) => (query.has("shape") ? notOffered(command) : modelOf(passes, lesson !== null)),
  weights: ({ passes }, query) => weightOf(passes, query),
  rows: ({ passes }, query) => rowsOf(passes, query),
  rope: ({ passes, command }, query) => (query.has("shape") ? notOffered(command) : ropeOf(passes, query)),
  tokens: ({ passes }, body) => json(tokensOf(passes, body)),
  word: ({ passes }, body) => json(wordOf(passes, body)),
  neighbors: ({ passes }, body) => neighborsOf(passes, body),
  similarity: ({ passes }, body) => similarityOf(passes, body),
};

/** What is no probe, by its path. */
const OTHERS: Readonly<Record<string, AskModel>> = {
  "/health": () => json({ status: "ready" }),
  "/inspect/passes": passOf,
  "/inspect/lesson": ({ lesson }) => lessonOf(lesson),
  "/inspect/requests": ({ command }) => withoutRequests(command),
  "/props": ({ passes, chat }) => json({ chat_format: chat && "template", max_context: passes.config.context }),
  "/v1/chat/completions": ({ passes, chat, command }, body) => ({ events: chatOf(passes, chat, body, command), last: "[DONE]" }),
  "/v1/completions": ({ passes, chat, command }, body) => ({ events: completionOf(passes, chat, body, command), last: "[DONE]" }),
};

const OF_PASS: { readonly [N in keyof OfPass]?: AskPass } = {
  next: nextOf,
  heads: headsOf,
  "heads/added": headsAdded,
  head_kinds: headKindsOf,
  neurons: neuronsOf,
  attribution: attributionOf,
  lens: lensOf,
  "lens/grid": lensGridOf,
  picture: pictureOf,
  distances: distancesOf,
  score: scoreOf,
  cost: costOf,
  matrix: (passes, _, query) => matrixOf(passes, query),
  sampler: samplerOf,
  edited: editedOf,
  patches: patchesOf,
};

/** Answer a question about an open model; `Refused` where there is no answer. */
export function answer(opened: Opened, { method, path, body }: Question): Answer {
  const [route, query] = path.split("?") as [string, string | undefined];
  const fields = method === "GET" ? Fields.of(new URLSearchParams(query)) : new Fields((body ?? {}) as Record<string, unknown>);
  const ofModel = OTHERS[route] ?? OF_MODEL[route.replace("/inspect/", "") as keyof OfModel];
  if (ofModel) return ofModel(opened, fields);
  const [, id, what] = /^\/inspect\/passes\/([^/]+)\/(.+)$/.exec(route) ?? [];
  if (id === undefined || what === undefined) return notOffered(opened.command);
  const pass = opened.passes.find(id);
  if (what.startsWith("activations/")) return select(opened.passes, pass, what.slice("activations/".length), fields);
  const ofPass = OF_PASS[what as keyof OfPass];
  return ofPass ? ofPass(opened.passes, pass, fields) : notOffered(opened.command);
}

function lessonOf(lesson: ClassLesson | null): Answer {
  if (lesson) return json(lesson);
  throw new Refused(404, "this site has no lesson; write it with `llamarium site --lesson FILE`", "no_lesson");
}

/** Refuse live requests, with the code at which the page stops polling for them. */
function withoutRequests(command: string): never {
  throw new Refused(404, `live requests need a local server: run ${command} --inspect-requests`, "requests_not_inspected");
}

function notOffered(command: string): never {
  throw new Refused(404, `This needs Llamarium on your computer: pip install llamarium, then ${command}`, "not_offered");
}

function passOf({ passes, command }: Opened, body: Fields): Answer {
  const experiment = body.value("experiment");
  if (experiment !== undefined && experiment !== null) return notOffered(command);
  if (body.has("adapter")) throw new Refused(404, "this site has no adapters; leave out adapter", "unknown_adapter", "adapter");
  if (body.has("messages")) return notOffered(command);
  const ids = body.has("ids") ? (body.value("ids") as number[]) : passes.model.encode(body.text("text"), { bos: body.bool("add_special_tokens", true) }).ids;
  return json(viewOf(passes, passes.add(ids)));
}
