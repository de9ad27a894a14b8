/** Edits of a pass: parts removed or scaled, steering, and activations of a second prompt. As `inspect/interventions`. */
import type { Edit, Part } from "../../engine/types";
import type { EditedView, EditFields, Measured, PatchBeginView, PatchCell, PatchCellsView, SteeringFields } from "../../schema";
import { events, Fields, json, Refused, type Answer } from "../asked";
import type { Name, Pass, Passes } from "../passes";
import { largest, logSoftmax, range, row, softmax } from "../tensor";
import { predictionOf } from "./layers";
import { tokenOf, runnerOf } from "./text";

const MOST_CELLS = 4096; // of one grid: each is a pass from its position on
const MOST_PATCHED = 256;

/** Of the edited pass and the plain one both are the pass that answers: rounding adds nothing. */
const NO_FLOOR = { logprob: 0, divergence: 0 } as const;

function positionsOf(fields: Fields, tokens: number): number[] | null {
  const positions = fields.value("positions") as readonly number[] | null | undefined;
  return positions ? positions.map((_, i) => new Fields({ ...positions }).whole(String(i), undefined, { below: tokens })) : null;
}

function editOf({ config }: Passes, pass: Pass, given: EditFields): Edit {
  const fields = new Fields({ ...given });
  const part = fields.text("part") as Part;
  if (!["embed", "attention", "head", "mlp", "residual"].includes(part)) throw new Refused(400, `part is ${part}; it must be embed, attention, head, mlp or residual`, "invalid_parameter", "edits");
  return {
    part, positions: positionsOf(fields, pass.ids.length), factor: fields.number("factor", 0),
    layer: part === "embed" ? null : fields.whole("layer", undefined, { below: config.layers }),
    head: part === "head" ? fields.whole("head", undefined, { below: config.heads }) : null,
  };
}

/** The difference of two prompts at their last tokens, added to the stream after a layer. */
function steeringOf(passes: Passes, pass: Pass, given: SteeringFields): Edit {
  const fields = new Fields({ ...given });
  const layer = fields.whole("layer", undefined, { below: passes.config.layers });
  const [toward, away] = (["toward", "away"] as const).map((name) => {
    const { id, ids } = passes.add(passes.model.encode(fields.text(name)).ids);
    return passes.at({ id, ids }, "resid", layer, [ids.length - 1]).values;
  }) as [Float32Array, Float32Array];
  const strength = fields.number("strength", 1);
  return { part: "residual", layer, head: null, factor: 1, add: toward.map((value, d) => strength * (value - (away[d] as number))), positions: positionsOf(fields, pass.ids.length) };
}

const kl = (p: Float32Array, q: Float32Array): number => Math.max(0, p.reduce((sum, logprob, i) => sum + Math.exp(logprob) * (logprob - (q[i] as number)), 0));

export function editedOf(passes: Passes, pass: Pass, body: Fields): Answer {
  const { vocab, context } = passes.config;
  const position = body.whole("position", pass.ids.length - 1, { below: pass.ids.length });
  const most = body.whole("max_tokens", 0, { below: Math.min(32, context - position - 1) + 1 });
  const [k, chosen] = [Math.min(body.whole("k", 10, { least: 1, below: 51 }), vocab), body.maybe("token_id", { below: vocab })];
  const edits = ((body.value("edits") ?? []) as EditFields[]).map((one) => editOf(passes, pass, one));
  if (body.has("steering")) edits.push(steeringOf(passes, pass, body.value("steering") as SteeringFields));
  const ids = pass.ids.slice(0, position + 1);
  const before = passes.logits(pass, position, position + 1);
  const after = passes.edited(ids, 0, edits);
  if (after.some((logit) => !Number.isFinite(logit))) throw new Refused(400, "with these edits the logits are not finite; use smaller factors or strengths", "not_finite", "edits");
  const reported = new Set([...largest(before, k), ...largest(after, k), ...(chosen === undefined ? [] : [chosen])]);
  const tokens = [...reported].map((id) => ({ token_id: id, text: passes.model.piece(id), before: predictionOf(before, id), after: predictionOf(after, id) }));
  tokens.sort((a, b) => b.before.logprob - a.before.logprob || a.token_id - b.token_id);
  return json({
    position, runner: runnerOf(passes.model), divergence: kl(logSoftmax(before), logSoftmax(after)), floor: NO_FLOOR, tokens,
    answer_before: goesOn(passes, ids, most, []), answer_after: goesOn(passes, ids, most, edits),
  } satisfies EditedView);
}

/** The most probable tokens behind a text, one after the other, with edits. */
function goesOn(passes: Passes, ids: readonly number[], most: number, edits: readonly Edit[]): EditedView["answer_before"] {
  const answer: number[] = [];
  for (let logits = most ? passes.edited(ids, 0, edits) : new Float32Array(); answer.length < most; ) {
    const [best] = largest(logits, 1) as [number];
    if (passes.config.endIds.includes(best)) break;
    answer.push(best);
    if (answer.length < most) logits = passes.edited([...ids, ...answer], ids.length + answer.length - 1, edits);
  }
  return answer.map((id) => tokenOf(passes.model, id));
}

const PATCHED: Readonly<Record<string, readonly [Part, Name]>> = { residual: ["residual", "resid"], attention: ["attention", "attn_out"], mlp: ["mlp", "mlp_out"] };

export function patchesOf(passes: Passes, pass: Pass, body: Fields): Answer {
  const { config: { layers, vocab } } = passes;
  const source = passes.add(body.value("source_ids") as number[]);
  const tokens = pass.ids.length;
  if (source.ids.length !== tokens) {
    throw new Refused(400, `the second prompt has ${source.ids.length} tokens and the first ${tokens}; expected as many, so that each token has one to take its place`, "invalid_parameter", "source_ids");
  }
  if (tokens > MOST_PATCHED) throw new Refused(400, `${tokens} tokens; ${MOST_PATCHED} at most are patched: use shorter prompts`, "invalid_parameter", "source_ids");
  const [target, against] = [body.whole("token_id", undefined, { below: vocab }), body.maybe("against_id", { below: vocab })];
  const rows = (body.value("layers") as number[] | null | undefined) ?? range(0, layers);
  const columns = (body.value("positions") as number[] | null | undefined) ?? range(0, tokens);
  if (rows.length * columns.length > MOST_CELLS) throw new Refused(400, `${rows.length * columns.length} cells; ${MOST_CELLS} at most are computed at once: ask for fewer layers or positions`, "invalid_parameter", "positions");
  const part = PATCHED[body.has("part") ? body.text("part") : "residual"];
  if (!part) throw new Refused(400, "part must be residual, attention or mlp", "invalid_parameter", "part");
  const measure = (logits: Float32Array): Measured => ({
    logit: (logits[target] as number) - (against === undefined ? 0 : (logits[against] as number)), probability: softmax(logits)[target] as number,
  });
  return events(gridOf(passes, pass, source, { part, rows: [...rows].sort((a, b) => a - b), columns: [...columns].sort((a, b) => a - b), measure }));
}

interface Grid {
  readonly part: readonly [Part, Name];
  readonly rows: number[];
  readonly columns: number[];
  readonly measure: (logits: Float32Array) => Measured;
}

function* gridOf(passes: Passes, pass: Pass, source: Pass, { part: [part, name], rows, columns, measure }: Grid): Generator<PatchBeginView | PatchCellsView> {
  const last = pass.ids.length - 1;
  const [base, other] = [pass, source].map((one) => measure(passes.logits(one, last, last + 1))) as [Measured, Measured];
  const total = rows.length * columns.length;
  yield { type: "begin", base, source: other, floor: 0, layers: rows, positions: columns, total };
  const whole = other.logit - base.logit;
  let done = 0;
  for (const layer of rows) {
    const [own, put] = [passes.tapped(pass, name, layer), passes.tapped(source, name, layer)];
    passes.logits(pass, last, last + 1); // its keys and values are those that the cells go on from
    const found = new Map<number, Measured>();
    for (const position of columns.toReversed()) { // a cell changes the keys and values from its position on
      const [mine, add] = [own, put].map((values) => row(values, position, passes.config.hidden)) as [Float32Array, Float32Array];
      const isSame = mine.every((value, d) => value === add[d]);
      found.set(position, isSame ? base : measure(passes.edited(pass.ids, position, [{ part, layer, head: null, factor: 0, add, positions: [position] }])));
    }
    const cells: PatchCell[] = columns.map((position) => {
      const { logit, probability } = found.get(position) as Measured;
      return { layer, position, logit, probability, recovered: whole === 0 ? null : (logit - base.logit) / whole, done: ++done, total };
    });
    yield { type: "cells", cells, done };
  }
}
