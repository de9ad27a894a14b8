import { beforeEach, describe, expect, it } from "vitest";
import type { Attribution, EditedView, HeadKinds, HeadShares, Lens, ModelView, Neighbors, Neurons, NextView, PassView, PatchBeginView, PatchCellsView, RopeAngles, SamplerSteps, ScoreView, TokensView } from "../src/schema";
import { answer, type Opened } from "../src/site/routes";
import { Refused } from "../src/site/asked";
import { Passes } from "../src/site/passes";
import type { Tensor } from "../src/site/tensor";
import { noiseOf } from "../src/site/views/next";
import { FakeModel } from "./fake-model";

const TEXT = "abc dab";
const COMMAND = "llamarium inspect -m fake";
let model: FakeModel;
let opened: Opened;

beforeEach(() => {
  model = new FakeModel();
  opened = { passes: new Passes(model), command: COMMAND, chat: null, lesson: null };
});

function asked<T>(method: string, path: string, body: unknown): T {
  const told = answer(opened, { method, path, body });
  return ("json" in told ? told.json : "numbers" in told ? told.numbers : told.events) as T;
}

const get = <T>(path: string): T => asked("GET", path, undefined);
const post = <T>(path: string, body: unknown): T => asked("POST", path, body);

const pass = (text = TEXT): PassView => post("/inspect/passes", { text });
const last = TEXT.length - 1;

function refusal(work: () => unknown): Refused {
  try {
    work();
  } catch (error) {
    expect(error).toBeInstanceOf(Refused);
    return error as Refused;
  }
  throw new Error("it was answered");
}

describe("a pass", () => {
  it("has the text's tokens, and the same id for the same ids", () => {
    const { id, tokens } = pass();
    expect(tokens.map(({ text }) => text).join("")).toBe(TEXT);
    expect(pass().id).toBe(id);
    expect(post<PassView>("/inspect/passes", { ids: tokens.map((one) => one.id) }).id).toBe(id);
    expect(pass("abc").id).not.toBe(id);
  });
  it("is refused where its ids are none, and forgotten ones are asked for again", () => {
    expect(refusal(() => post("/inspect/passes", { ids: [0, 99] }))).toMatchObject({ status: 400, param: "ids" });
    expect(refusal(() => pass("a".repeat(65)))).toMatchObject({ status: 400, code: "context_length_exceeded" });
    expect(refusal(() => get("/inspect/passes/none/next"))).toMatchObject({ status: 404, code: "unknown_pass" });
  });
  it("runs only the tokens that the one before has not", () => {
    const first = pass("abc");
    get(`/inspect/passes/${first.id}/next`);
    expect(model.ran).toBe(3);
    get(`/inspect/passes/${pass("abcd").id}/next`);
    expect(model.ran).toBe(4);
    get(`/inspect/passes/${pass("abd").id}/next`);
    expect(model.ran).toBe(5);
  });
});

describe("activations", () => {
  const of = (name: string, query = ""): Tensor => get(`/inspect/passes/${pass().id}/activations/${name}${query}`);

  it("have the axes that a query leaves", () => {
    expect(of("embed")).toMatchObject({ axes: "TD", shape: [7, 16] });
    expect(of("q")).toMatchObject({ axes: "LTNH", shape: [3, 7, 4, 4] });
    expect(of("q", "?layer=1&head=2&position=3")).toMatchObject({ axes: "H", shape: [4] });
    expect(of("k_rot", "?layer=1&head=1")).toMatchObject({ axes: "SH", shape: [7, 4] });
    expect(of("k", "?layer=1&position=2")).toMatchObject({ axes: "KH", shape: [2, 4] });
    expect(of("pattern", "?position=4")).toMatchObject({ axes: "LNS", shape: [3, 4, 7] });
    expect(of("pattern", "?layer=0&stride=3")).toMatchObject({ axes: "NTS", shape: [4, 3, 3] });
    expect(of("logits", "?position=6")).toMatchObject({ axes: "V", shape: [12] });
    expect(of("resid", "?layer=2&start=2&stop=4")).toMatchObject({ axes: "TD", shape: [2, 16] });
  });
  it("are parts of the whole", () => {
    const [whole, part] = [of("q"), of("q", "?layer=1&head=2&position=3")];
    const begin = ((1 * 7 + 3) * 4 + 2) * 4;
    expect([...part.values]).toEqual([...whole.values.slice(begin, begin + 4)]);
    const [k, key] = [of("k_rot", "?layer=2"), of("k_rot", "?layer=2&head=1&position=5")];
    expect([...key.values]).toEqual([...k.values.slice((5 * 2 + 1) * 4, (5 * 2 + 2) * 4)]);
  });
  it("have shares that add up to one and give what a head gathers", () => {
    const pattern = of("pattern", "?layer=1&head=3&position=5");
    expect(pattern.values.reduce((a, b) => a + b)).toBeCloseTo(1, 6);
    expect(pattern.values[6]).toBe(0);
    expect(of("scores", "?layer=1&head=3&position=5").values[6]).toBe(-Infinity);
    const [values, gathered] = [of("v", "?layer=1&head=1"), of("head_out", "?layer=1&head=3&position=5")];
    const sum = [0, 1, 2, 3].map((h) => pattern.values.reduce((all, share, s) => all + share * (values.values[s * 4 + h] as number), 0));
    sum.forEach((one, h) => expect(one).toBeCloseTo(gathered.values[h] as number, 5));
  });
  it("are refused where there are none", () => {
    expect(refusal(() => of("nothing"))).toMatchObject({ status: 404, code: "unknown_activation" });
    expect(refusal(() => of("embed", "?layer=0"))).toMatchObject({ status: 400, param: "layer" });
    expect(refusal(() => of("gate", "?head=0"))).toMatchObject({ status: 400, param: "head" });
    expect(refusal(() => of("q", "?layer=3"))).toMatchObject({ status: 400, param: "layer" });
    expect(refusal(() => of("q", "?position=7"))).toMatchObject({ status: 400, param: "position" });
    expect(refusal(() => of("q", "?start=4&stop=4"))).toMatchObject({ status: 400, param: "stop" });
  });
});

describe("what comes next", () => {
  it("is the softmax of the logits, the best first", () => {
    const { id } = pass();
    const { values } = get<Tensor>(`/inspect/passes/${id}/activations/logits?position=${last}`);
    const { candidates } = get<NextView>(`/inspect/passes/${id}/next?k=12`);
    const total = values.reduce((sum, logit) => sum + Math.exp(logit), 0);
    candidates.forEach((one, i) => {
      expect(one.logit).toBe(values[one.token_id]);
      expect(one.probability).toBeCloseTo(Math.exp(one.logit) / total, 6);
      if (i) expect(one.probability).toBeLessThanOrEqual(candidates[i - 1]?.probability as number);
    });
    expect(candidates.reduce((sum, one) => sum + one.probability, 0)).toBeCloseTo(1, 6);
  });
  it("is chosen by the engine, step by step", () => {
    const ask = (body: object): SamplerSteps => post(`/inspect/passes/${pass().id}/sampler`, body);
    const { candidates } = get<NextView>(`/inspect/passes/${pass().id}/next?k=12`);
    const greedy = ask({ temperature: 0, seed: 1 });
    expect(greedy).toMatchObject({ token_id: candidates[0]?.token_id, place: 0, draw: null });
    expect(greedy.steps.map(({ name }) => name)).toEqual(["logits", "logit_bias", "penalties", "grammar"]);
    const drawn = ask({ temperature: 0.5, top_k: 3, top_p: 0.9, seed: 4, start: 5, k: 12 });
    expect(drawn.place).toBe(2);
    expect(drawn.steps.map(({ name, is_on: isOn }) => [name, isOn])).toEqual([
      ["logits", true], ["logit_bias", false], ["penalties", false], ["grammar", false], ["temperature", true], ["top_k", true], ["top_p", true], ["min_p", false],
    ]);
    expect(drawn.steps[5]?.num_left).toBe(3);
    expect(drawn.draw?.every(({ noise, total }, i) => total === (drawn.steps.at(-1)?.candidates[i]?.logit as number) + noise)).toBe(true);
    expect(refusal(() => ask({ tools: [] }))).toMatchObject({ status: 404, code: "not_offered" });
  });
  it("has the noise of the Python sampler", () => {
    // llamarium.sampling.steps.noise for seed 123456789, 5 tokens so far
    expect([0, 1, 64].map(noiseOf(123456789, 5))).toEqual([0.09402408951321518, 0.6951844277118582, 0.6656672992328218]);
  });
  it("tells how probable the text's own tokens were", () => {
    const { tokens } = get<ScoreView>(`/inspect/passes/${pass().id}/score?start=1`);
    expect(tokens.map(({ position }) => position)).toEqual([1, 2, 3, 4, 5, 6]);
    const { candidates } = get<NextView>(`/inspect/passes/${pass().id}/next?position=3&k=12`);
    const own = candidates.find(({ token_id: id }) => id === tokens[3]?.token_id);
    expect(tokens[3]?.logprob).toBe(own?.logprob);
    expect(tokens[3]?.rank).toBe(candidates.indexOf(own as NextView["candidates"][number]) + 1);
  });
});

describe("views of the layers", () => {
  it("divide a logit into what was added to the stream", () => {
    const path = `/inspect/passes/${pass().id}`;
    const { values } = get<Tensor>(`${path}/activations/logits?position=${last}`);
    const found = get<Attribution>(`${path}/attribution?token_id=3&against_id=5`);
    expect(found.logit).toBe((values[3] as number) - (values[5] as number));
    expect(found.additions).toHaveLength(7);
    expect(Math.abs(found.rounding)).toBeLessThan(1e-5);
    const ofLayer = found.heads.filter(({ layer }) => layer === 1).reduce((sum, { logit }) => sum + logit, 0);
    expect(ofLayer).toBeCloseTo(found.additions.find(({ part, layer }) => part === "attention" && layer === 1)?.logit as number, 5);
  });
  it("join heads, whose shares add up to one", () => {
    const heads = get<HeadShares>(`/inspect/passes/${pass().id}/heads?layer=2`);
    expect(heads.shares.reduce((a, b) => a + b)).toBeCloseTo(1, 6);
    expect(heads.rounding).toBeLessThan(1e-5);
    expect(get<Tensor>(`/inspect/passes/${pass().id}/heads/added?layer=2`)).toMatchObject({ axes: "ND", shape: [4, 16] });
  });
  it("read the stream with the lens, at the end as the model does", () => {
    const path = `/inspect/passes/${pass().id}`;
    const { layers } = get<Lens>(`${path}/lens?token_id=2&k=3`);
    const { candidates } = get<NextView>(`${path}/next?k=3`);
    expect(layers.map(({ layer, after }) => `${layer} ${after}`)).toEqual(["0 attention", "0 mlp", "1 attention", "1 mlp", "2 attention", "2 mlp"]);
    expect(layers.at(-1)?.candidates[0]?.map((one) => one.token_id)).toEqual(candidates.map((one) => one.token_id));
    const grid = get<Lens>(`${path}/lens/grid?after=mlp&start=2&stop=7&stride=2`);
    expect(grid.positions).toEqual([2, 4, 6]);
    expect(grid.layers[2]?.candidates[2]?.[0]).toEqual(layers.at(-1)?.candidates[0]?.[0]);
  });
  it("list the neurons that fire most", () => {
    const path = `/inspect/passes/${pass().id}`;
    const { values } = get<Tensor>(`${path}/activations/gated?layer=1&position=${last}`);
    const { neurons, positions } = get<Neurons>(`${path}/neurons?layer=1&k=2&stride=4`);
    expect(positions).toEqual([0, 4, 6]);
    expect(Math.abs(neurons[0]?.gated as number)).toBe(Math.max(...values.map(Math.abs)));
    expect(neurons[0]?.by_token.at(-1)).toBe(neurons[0]?.gated);
  });
  it("sort heads by where they look", () => {
    const { heads, num_repeated: repeated } = get<HeadKinds>(`/inspect/passes/${pass("abab").id}/head_kinds`);
    expect(heads).toHaveLength(12);
    expect(repeated).toBe(2);
    expect(heads.every(({ previous, first, itself, induction }) => [previous, first, itself, induction].every((one) => (one as number) >= 0 && (one as number) <= 1))).toBe(true);
  });
  it("see a pass from far", () => {
    const { values } = get<Tensor>(`/inspect/passes/${pass().id}/picture?start=0&stop=7&stride=1`);
    const L = 3, C = 7;
    expect(values).toHaveLength((L + 1 + 4 * L) * C + (L * C * (C + 1)) / 2);
    expect(values.at(-28)).toBeCloseTo(1, 6); // the first token sees itself alone, in the last layer too
    const resid = get<Tensor>(`/inspect/passes/${pass().id}/activations/resid?layer=0&position=2`).values;
    expect(values[C + 2]).toBeCloseTo(Math.hypot(...resid), 5);
    const blocks = get<Tensor>(`/inspect/passes/${pass().id}/picture?start=2&stop=7&stride=3&blocks=true`).values;
    expect(blocks).toHaveLength((L + 1 + 4 * L) * 2 + L * 3);
  });
});

describe("interventions", () => {
  const edited = (body: object): EditedView => post(`/inspect/passes/${pass().id}/edited`, body);
  const best = (): number => get<NextView>(`/inspect/passes/${pass().id}/next`).candidates[0]?.token_id as number;

  it("change nothing where a part keeps its factor, and the prediction where it is removed", () => {
    const same = edited({ edits: [{ part: "mlp", layer: 1, factor: 1 }], max_tokens: 3 });
    expect(same.divergence).toBe(0);
    expect(same.answer_after).toEqual(same.answer_before);
    expect(same.answer_before[0]?.id).toBe(best());
    const other = edited({ edits: [{ part: "head", layer: 0, head: 2 }, { part: "attention", layer: 2, positions: [6] }], token_id: 11, k: 2 });
    expect(other.divergence).toBeGreaterThan(0);
    expect(other.tokens.map((one) => one.token_id)).toContain(11);
    expect(other.tokens[0]?.token_id).toBe(best());
    expect(get<NextView>(`/inspect/passes/${pass().id}/next`).candidates[0]?.token_id).toBe(best()); // the pass itself stays as it is
  });
  it("steer by the difference of two prompts", () => {
    const steering = { toward: "aa", away: "bb", layer: 1 };
    expect(edited({ steering: { ...steering, strength: 0 } }).divergence).toBe(0);
    expect(edited({ steering: { ...steering, strength: 2 } }).divergence).toBeGreaterThan(0);
  });
  it("are refused where there is no such part or place", () => {
    expect(refusal(() => edited({ edits: [{ part: "mlp", layer: 3 }] }))).toMatchObject({ status: 400, param: "layer" });
    expect(refusal(() => edited({ edits: [{ part: "head", layer: 0, head: 4 }] }))).toMatchObject({ status: 400, param: "head" });
    expect(refusal(() => edited({ edits: [{ part: "mlp", layer: 0, positions: [7] }] })).status).toBe(400);
  });
  it("put a second prompt's activations in, place by place", () => {
    const base = pass("abcdab");
    const ids = pass("abcjab").tokens.map(({ id }) => id) as [number, ...number[]];
    const [begin, ...rows] = post<Generator<PatchBeginView | PatchCellsView>>(`/inspect/passes/${base.id}/patches`, { source_ids: ids, token_id: 1 });
    expect(begin).toMatchObject({ type: "begin", total: 18, layers: [0, 1, 2], positions: [0, 1, 2, 3, 4, 5] });
    const cells = (rows as PatchCellsView[]).flatMap((one) => one.cells);
    expect(cells.map(({ done }) => done)).toEqual(Array.from({ length: 18 }, (_, i) => i + 1));
    const at = (layer: number, position: number): number => cells.find((one) => one.layer === layer && one.position === position)?.recovered as number;
    expect([0, 1, 2].map((position) => at(0, position))).toEqual([0, 0, 0]); // what is before the difference is the same
    expect(at(2, 5)).toBeCloseTo(1, 5); // the whole of the last stream is the source's
    expect(at(2, 3)).toBe(0); // nothing reads an earlier token's stream after the last layer
    expect(at(0, 3)).not.toBe(0);
  });
});

describe("the model", () => {
  it("is described by its modules, and by what runs it here", () => {
    const view = get<ModelView>("/inspect/model");
    expect(view).toMatchObject({ name: "fake", runner: "WebAssembly (fake, one thread)", dtype: "float32", kv_bytes_per_token: 192, tied: true, adds_bos: false });
    expect(view.tree.children.map(({ name, kind }) => [name, kind])).toEqual([["model", "LlamaModel"], ["lm_head", "Linear"]]);
    const layers = view.tree.children[0]?.children.find(({ name }) => name === "layers");
    expect(layers?.children.map(({ path, kind }) => [path, kind])).toEqual([0, 1, 2].map((i) => [`model.layers.${i}`, "LlamaDecoderLayer"]));
    expect(view.tree.parameters).toBe(12 * 16 + 3 * (2 * 16 + 2 * 16 * 16 + 2 * 8 * 16 + 3 * 24 * 16) + 16);
    expect(get("/health")).toEqual({ status: "ready" });
  });
  it("has angles, rows and neighbours", () => {
    const { pairs } = get<RopeAngles>("/inspect/rope?position=3");
    expect(pairs.map(({ angle }) => angle)).toEqual([3, Math.fround(Math.fround(0.01) * 3)]);
    const { neighbors } = post<Neighbors>("/inspect/neighbors", { word: 4, k: 3 });
    expect(neighbors.map((one) => one.token_id)).not.toContain(4);
    expect(neighbors[0]?.cosine).toBeGreaterThanOrEqual(neighbors[1]?.cosine as number);
    expect(get<Tensor>("/inspect/rows?ids=4,0")).toMatchObject({ axes: "RD", shape: [2, 16] });
    expect(get<Tensor>(`/inspect/passes/${pass().id}/matrix?layer=1&linear=down_proj&start=3&count=2`)).toMatchObject({ axes: "RI", shape: [2, 24] });
  });
  it("tells scores by distance that agree with the pass", () => {
    const path = `/inspect/passes/${pass().id}`;
    const { scores } = get<{ scores: number[] }>(`${path}/distances?layer=1&head=2&position=6&key=2&stop=8`);
    const own = get<Tensor>(`${path}/activations/scores?layer=1&head=2&position=6`).values[2] as number;
    expect(scores[4]).toBeCloseTo(own, 5);
  });
  it("cuts a text into characters", () => {
    const { tokens, pieces, unexplained } = post<TokensView>("/inspect/tokens", { text: "ab", add_special_tokens: false });
    expect(tokens.map(({ id }) => id)).toEqual([0, 1]);
    expect(pieces.map(({ text, start, ids }) => [text, start, ids])).toEqual([["a", 0, [0]], ["b", 1, [1]]]);
    expect(unexplained).toBeNull();
  });
  it("names the command that shows what needs more", () => {
    for (const path of ["/inspect/build", "/inspect/model?shape=llama-3.1-8b", `/inspect/passes/${pass().id}/moment`, "/inspect/source?name=mlp"]) {
      const refused = refusal(() => get(path));
      expect(refused).toMatchObject({ status: 404, code: "not_offered" });
      expect(refused.message).toContain(COMMAND);
    }
    expect(refusal(() => post("/inspect/passes", { text: "a", experiment: { bidirectional: true } }))).toMatchObject({ code: "not_offered" });
  });
});
