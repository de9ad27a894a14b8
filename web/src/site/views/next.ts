/** What may come after a token, how the sampler chooses, and how probable the text's own tokens were. As `page/probes/sampling.py`. */
import type { CandidateView, NextView, SamplerCandidate, SamplerStep, SamplerSteps, ScoreView } from "../../schema";
import { json, Refused, type Answer, type Fields } from "../asked";
import type { Pass, Passes } from "../passes";
import { largest, logSoftmax, row, softmax } from "../tensor";

const MOST_SCORED = 128;

/** The most probable tokens of a row of logits. */
export function candidatesOf({ model }: Passes, logits: Float32Array, k: number): CandidateView[] {
  const logprobs = logSoftmax(logits);
  return largest(logprobs, k).map((id) => ({
    token_id: id, text: model.piece(id), logit: logits[id] as number,
    logprob: logprobs[id] as number, probability: Math.fround(Math.exp(logprobs[id] as number)),
  }));
}

export function nextOf(passes: Passes, pass: Pass, query: Fields): Answer {
  const position = query.whole("position", pass.ids.length - 1, { below: pass.ids.length });
  const k = Math.min(query.whole("k", 10, { least: 1, below: 201 }), passes.config.vocab);
  const candidates = candidatesOf(passes, passes.logits(pass, position, position + 1), k);
  return json({ position, candidates } satisfies NextView);
}

interface Stage {
  name: string;
  isOn: boolean;
  logits: Float32Array;
}

/** What each step of the sampler leaves of the logits; `sampling/steps.py` says what they do. */
function stagesOf(logits: Float32Array, body: Fields, ids: readonly number[], start: number): Stage[] {
  const penalized = penaltiesOf(logits, body, ids, start);
  const stages: Stage[] = [
    { name: "logits", isOn: true, logits },
    { name: "logit_bias", isOn: false, logits },
    { name: "penalties", isOn: penalized !== logits, logits: penalized },
    { name: "grammar", isOn: false, logits: penalized },
  ];
  const temperature = body.number("temperature", 1);
  if (temperature === 0) return stages;
  const most = penalized.reduce((a, b) => Math.max(a, b), -Infinity);
  let now = penalized.map((logit) => Math.fround(logit - most) / Math.fround(temperature));
  stages.push({ name: "temperature", isOn: temperature !== 1, logits: now });
  const filter = (name: string, isOn: boolean, stays: (i: number) => boolean): void => {
    if (isOn) now = now.map((logit, i) => (stays(i) ? logit : -Infinity));
    stages.push({ name, isOn, logits: now });
  };
  const topK = body.whole("top_k", 0);
  const before = now;
  const least = topK > 0 && topK < now.length ? (now.toSorted()[now.length - topK] as number) : -Infinity;
  filter("top_k", topK > 0 && topK < now.length, (i) => (before[i] as number) >= least);
  const [topP, minP] = [body.number("top_p", 1), body.number("min_p", 0)];
  const shares = softmax(now);
  const floor = nucleusFloor(shares, topP);
  filter("top_p", topP < 1, (i) => (shares[i] as number) >= floor);
  const leastShare = Math.fround(Math.fround(minP) * shares.reduce((a, b) => Math.max(a, b), 0));
  filter("min_p", minP > 0, (i) => (shares[i] as number) >= leastShare);
  return stages;
}

/** The least probability among the fewest largest that reach p. */
function nucleusFloor(shares: Float32Array, topP: number): number {
  const sorted = shares.toSorted().reverse();
  let [below, sum] = [0, 0];
  for (const share of sorted) {
    sum += share;
    if (sum < topP) below++;
  }
  return sorted[Math.min(below, sorted.length - 1)] as number;
}

/** The logits with the penalties for tokens that a text holds; its answer begins at `start`. */
export function penaltiesOf(logits: Float32Array, body: Fields, ids: readonly number[], start: number): Float32Array {
  const [repetition, frequency, presence] = [body.number("repetition_penalty", 1), body.number("frequency_penalty", 0), body.number("presence_penalty", 0)];
  if (repetition === 1 && frequency === 0 && presence === 0) return logits;
  const left = logits.slice();
  const counts = new Map(ids.map((id) => [id, 0]));
  for (const id of ids.slice(start)) counts.set(id, (counts.get(id) ?? 0) + 1);
  for (const [id, times] of counts) {
    const logit = logits[id] as number;
    const scaled = Math.fround(logit > 0 ? logit / Math.fround(repetition) : logit * Math.fround(repetition));
    left[id] = Math.fround(scaled - Math.fround(Math.fround(frequency) * times)) - (times > 0 ? Math.fround(presence) : 0);
  }
  return left;
}

export function samplerOf(passes: Passes, pass: Pass, body: Fields): Answer {
  for (const field of ["response_format", "tools"]) {
    if (body.has(field)) throw new Refused(404, "tools and JSON schemas need a local server: run `llamarium inspect`", "not_offered", field);
  }
  const position = body.whole("position", pass.ids.length - 1, { below: pass.ids.length });
  const start = body.whole("start", position + 1, { least: 1, below: position + 2 });
  const k = Math.min(body.whole("k", 10, { least: 1, below: 201 }), passes.config.vocab);
  const ids = pass.ids.slice(0, position + 1);
  const [seed, place] = [body.whole("seed", Math.floor(Math.random() * 2 ** 32), { below: 2 ** 53 }), ids.length - start];
  const stages = stagesOf(passes.logits(pass, position, position + 1), body, ids, start);
  const temperature = body.number("temperature", 1);
  const sampling = { temperature, topP: body.number("top_p", 1), topK: body.whole("top_k", 0), minP: body.number("min_p", 0), seed, step: place };
  const chosen = passes.model.sample(stages[3]?.logits as Float32Array, sampling);
  const steps = stages.map((stage) => stepOf(passes, stage, k, chosen));
  const noise = noiseOf(seed, place);
  const draw = temperature === 0 ? null : (steps.at(-1)?.candidates ?? []).map(({ token_id: id, logit, text }) => ({ token_id: id, noise: noise(id), total: logit + noise(id), text }));
  return json({ token_id: chosen, text: passes.model.piece(chosen), seed, place, steps, draw } satisfies SamplerSteps);
}

function stepOf({ model }: Passes, { name, isOn, logits }: Stage, k: number, chosen: number): SamplerStep {
  const left = logits.reduce((count, logit) => count + (logit > -Infinity ? 1 : 0), 0);
  const shares = softmax(logits);
  const best = largest(logits, Math.min(k, left));
  const ids = best.includes(chosen) ? best : [...best, chosen];
  const candidates: SamplerCandidate[] = ids.map((id) => ({ token_id: id, logit: logits[id] as number, probability: shares[id] as number, text: model.piece(id) }));
  return { name, is_on: isOn, num_left: left, candidates };
}

const [GOLDEN, MIX1, MIX2, MASK] = [0x9e3779b97f4a7c15n, 0xbf58476d1ce4e5b9n, 0x94d049bb133111ebn, 2n ** 64n - 1n] as const;

/** Number n of splitmix64's stream from a state; as `sampling/steps.py`. */
function splitmix64(state: bigint, n: bigint): bigint {
  let z = (state + (n + 1n) * GOLDEN) & MASK;
  z = ((z ^ (z >> 30n)) * MIX1) & MASK;
  z = ((z ^ (z >> 27n)) * MIX2) & MASK;
  return z ^ (z >> 31n);
}

/** What the draw adds to a token's logit. */
export function noiseOf(seed: number, place: number): (id: number) => number {
  const stream = splitmix64(splitmix64(BigInt(seed), 0n), BigInt(place));
  return (id) => -Math.log(-Math.log1p(-(Number(splitmix64(stream, BigInt(id)) >> 12n) + 0.5) * 2 ** -52));
}

export function scoreOf(passes: Passes, pass: Pass, query: Fields): Answer {
  const { ids } = pass;
  const [start, width] = [query.whole("start", 1, { least: 1, below: ids.length }), passes.config.vocab];
  if (ids.length - start > MOST_SCORED) {
    throw new Refused(400, `start is ${start} of ${ids.length} tokens; at most the last ${MOST_SCORED} are scored at once`, "invalid_parameter", "start");
  }
  const logits = passes.logits(pass, start - 1, ids.length - 1);
  const tokens = ids.slice(start).map((id, i) => {
    const own = row(logits, i, width);
    const rank = own.reduce((count, logit) => count + (logit > (own[id] as number) ? 1 : 0), 1);
    return { position: start + i, token_id: id, logprob: logSoftmax(own)[id] as number, rank };
  });
  return json({ tokens } satisfies ScoreView);
}
