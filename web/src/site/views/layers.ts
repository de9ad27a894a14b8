/** What the layers do: heads, neurons, attribution, and the lens. As `inspect/probes` and `inspect/lens.py`. */
import type { Addition, Attribution, Candidate, ChosenToken, HeadKinds, HeadShares, Lens, Neurons } from "../../schema";
import { json, numbers, Refused, type Answer, type Fields } from "../asked";
import type { Name, Pass, Passes } from "../passes";
import { dot, largest, lengthOf, logSoftmax, range, row } from "../tensor";
import { candidatesOf } from "./next";
import { windowOf } from "../select";

const FLOATS = ["F32", "F16", "BF16"];
const MOST_GRID = 64; // tokens at each of which the lens reads every layer
const MOST_KINDS = 512; // tokens of all whose pairs each head has a share

const oProj = (layer: number): string => `model.layers.${layer}.self_attn.o_proj.weight`;

/** What an activation of a layer is at one token. */
const one = (passes: Passes, pass: Pass, name: Name, layer: number | undefined, at: number): Float32Array => passes.at(pass, name, layer, [at]).values;

/** What each head of a layer adds to a token's stream, (N, D). */
function addedBy(passes: Passes, pass: Pass, layer: number, at: number): Float32Array {
  const { model, config: { heads, headDim, hidden, weights } } = passes;
  const gathered = one(passes, pass, "head_out", layer, at);
  const alone = new Float32Array(heads * heads * headDim);
  for (let n = 0; n < heads; n++) alone.set(row(gathered, n, headDim), n * (heads + 1) * headDim);
  if (!FLOATS.includes(weights[oProj(layer)]?.type ?? "F32")) return model.product(oProj(layer), alone); // packed: as it multiplies
  const weight = model.rows(oProj(layer), range(0, hidden));
  const added = new Float32Array(heads * hidden);
  for (let n = 0; n < heads; n++) {
    for (let d = 0; d < hidden; d++) {
      const from = (d * heads + n) * headDim;
      added[n * hidden + d] = dot(row(gathered, n, headDim), weight.subarray(from, from + headDim));
    }
  }
  return added;
}

function placeOf(passes: Passes, pass: Pass, query: Fields): { layer: number; position: number } {
  const layer = query.whole("layer", undefined, { below: passes.config.layers });
  return { layer, position: query.whole("position", pass.ids.length - 1, { below: pass.ids.length }) };
}

export function headsOf(passes: Passes, pass: Pass, query: Fields): Answer {
  const { layer, position } = placeOf(passes, pass, query);
  const { heads, hidden } = passes.config;
  const added = addedBy(passes, pass, layer, position);
  const whole = Float32Array.from({ length: hidden }, (_, d) => range(0, heads).reduce((sum, n) => sum + (added[n * hidden + d] as number), 0));
  const rest = one(passes, pass, "attn_out", layer, position).map((value, d) => value - (whole[d] as number));
  const square = dot(whole, whole);
  const parts = range(0, heads).map((n) => row(added, n, hidden));
  return json({
    layer, position, norms: parts.map(lengthOf), rounding: lengthOf(rest), shares: parts.map((part) => (square ? dot(part, whole) / square : 0)),
  } satisfies HeadShares);
}

export function headsAdded(passes: Passes, pass: Pass, query: Fields): Answer {
  const { layer, position } = placeOf(passes, pass, query);
  const { heads, hidden } = passes.config;
  return numbers({ values: addedBy(passes, pass, layer, position), shape: [heads, hidden], axes: "ND" });
}

export function headKindsOf(passes: Passes, pass: Pass): Answer {
  const { ids } = pass;
  const { layers, heads } = passes.config;
  const T = ids.length;
  if (T > MOST_KINDS || T < 2) throw new Refused(400, `${T} tokens; heads are sorted on 2 to ${MOST_KINDS}`, "invalid_parameter", "id");
  const follows = ids.map((id, t) => range(1, t).filter((s) => ids[s - 1] === id));
  const repeated = follows.filter((keys) => keys.length).length;
  const found = range(0, layers).flatMap((layer) => {
    const { values } = passes.at(pass, "pattern", layer, range(0, T));
    return range(0, heads).map((head) => {
      const share = (t: number, s: number): number => values[(head * T + t) * T + s] as number;
      const mean = (of: (t: number) => number): number => range(1, T).reduce((sum, t) => sum + of(t), 0) / (T - 1);
      const sum = follows.reduce((all, keys, t) => all + keys.reduce((own, s) => own + share(t, s), 0), 0);
      return { layer, head, previous: mean((t) => share(t, t - 1)), first: mean((t) => share(t, 0)), itself: mean((t) => share(t, t)), induction: repeated ? sum / repeated : null };
    });
  });
  return json({ token_ids: [...ids], num_repeated: repeated, heads: found } satisfies HeadKinds);
}

export function neuronsOf(passes: Passes, pass: Pass, query: Fields): Answer {
  const { layer, position } = placeOf(passes, pass, query);
  const { intermediate: F } = passes.config;
  const [k, stride] = [query.whole("k", 12, { least: 1, below: Math.min(100, F) + 1 }), query.whole("stride", 1, { least: 1 })];
  const some = range(0, pass.ids.length, stride);
  const positions = some.includes(position) ? some : [...some, position];
  const [gate, act, up, gated] = (["gate", "act", "up", "gated"] as const).map((name) => one(passes, pass, name, layer, position)) as [Float32Array, Float32Array, Float32Array, Float32Array];
  const all = passes.at(pass, "gated", layer, positions).values;
  const neurons = largest(gated.map(Math.abs), k).map((index) => ({
    index, gate: gate[index] as number, act: act[index] as number, up: up[index] as number, gated: gated[index] as number,
    by_token: positions.map((_, t) => all[t * F + index] as number),
  }));
  return json({ layer, position, token_ids: [...pass.ids], positions, neurons } satisfies Neurons);
}

export function attributionOf(passes: Passes, pass: Pass, query: Fields): Answer {
  const { model, config: { hidden, heads, layers, vocab, normEps } } = passes;
  const position = query.whole("position", pass.ids.length - 1, { below: pass.ids.length });
  const target = query.whole("token_id", undefined, { below: vocab });
  const against = query.maybe("against_id", { below: vocab });
  const logits = passes.logits(pass, position, position + 1);
  const [own, other] = [target, against ?? target].map((id) => model.rows("lm_head.weight", [id])) as [Float32Array, Float32Array];
  const logit = (logits[target] as number) - (against === undefined ? 0 : (logits[against] as number));
  const last = one(passes, pass, "resid", layers - 1, position);
  const scale = 1 / Math.sqrt(dot(last, last) / hidden + normEps);
  const gamma = model.rows("model.norm.weight");
  const toward = Float64Array.from(own, (value, d) => (value - (against === undefined ? 0 : (other[d] as number))) * (gamma[d] as number) * scale);
  const addition = (part: Addition["part"], layer: number | null, head: number | null, vector: Float32Array): Addition => ({ part, layer, head, norm: lengthOf(vector), logit: dot(vector, toward) });
  const additions = [addition("embed", null, null, one(passes, pass, "embed", undefined, position))];
  const byHead: Addition[] = [];
  for (let layer = 0; layer < layers; layer++) {
    additions.push(addition("attention", layer, null, one(passes, pass, "attn_out", layer, position)));
    additions.push(addition("mlp", layer, null, one(passes, pass, "mlp_out", layer, position)));
    const added = addedBy(passes, pass, layer, position);
    for (let head = 0; head < heads; head++) byHead.push(addition("head", layer, head, row(added, head, hidden)));
  }
  const rounding = logit - additions.reduce((sum, { logit: share }) => sum + share, 0);
  return json({
    token_ids: [...pass.ids], position, target_id: target, against_id: against ?? null, logit, scale, additions, heads: byHead, rounding,
  } satisfies Attribution);
}

/** What the model would predict from the stream after a half of a layer, at some tokens. */
function readAt(passes: Passes, pass: Pass, after: "attention" | "mlp", layer: number, positions: readonly number[], k: number, chosen: number | undefined): Lens["layers"][number] {
  const { model, config: { vocab } } = passes;
  const { values } = passes.at(pass, after === "mlp" ? "resid" : "resid_mid", layer, positions);
  const logits = model.readStream(values);
  const rows = positions.map((_, i) => row(logits, i, vocab));
  const candidates: Candidate[][] = rows.map((one) => candidatesOf(passes, one, k).map(({ token_id, probability, logprob, text }) => ({ token_id, probability, logprob, text })));
  return { layer, candidates, after, chosen: chosen === undefined ? [] : rows.map((one) => predictionOf(one, chosen)) };
}

/** What a row of logits predicts of a token. */
export function predictionOf(logits: Float32Array, id: number): ChosenToken {
  const logprob = logSoftmax(logits)[id] as number;
  const rank = logits.reduce((count, logit) => count + (logit > (logits[id] as number) ? 1 : 0), 1);
  return { probability: Math.fround(Math.exp(logprob)), logprob, rank };
}

export function lensOf(passes: Passes, pass: Pass, query: Fields): Answer {
  const { layers, vocab } = passes.config;
  const position = query.whole("position", pass.ids.length - 1, { below: pass.ids.length });
  const k = query.whole("k", 5, { least: 1, below: Math.min(20, vocab) + 1 });
  const chosen = query.maybe("token_id", { below: vocab });
  const places = range(0, layers).flatMap((layer) => (["attention", "mlp"] as const).map((after) => readAt(passes, pass, after, layer, [position], k, chosen)));
  return json({ token_ids: [...pass.ids], positions: [position], layers: places, chosen_id: chosen ?? null } satisfies Lens);
}

export function lensGridOf(passes: Passes, pass: Pass, query: Fields): Answer {
  const { layers, vocab } = passes.config;
  const { rows } = windowOf(query, pass.ids.length);
  if (rows.length > MOST_GRID) throw new Refused(400, `${rows.length} tokens are requested, and ${MOST_GRID} at most at once; give start and stop, or stride`, "invalid_parameter", "stop");
  const chosen = query.maybe("token_id", { below: vocab });
  const after = query.has("after") && query.text("after") === "attention" ? "attention" : "mlp";
  const places = range(0, layers).map((layer) => readAt(passes, pass, after, layer, rows, 1, chosen));
  return json({ token_ids: [...pass.ids], positions: rows, layers: places, chosen_id: chosen ?? null } satisfies Lens);
}
