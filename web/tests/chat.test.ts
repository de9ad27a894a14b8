import { describe, expect, it } from "vitest";
import { Events } from "../src/lib/events";
import { readLink, writeLink } from "../src/lib/link";
import {
  added, changed, EMPTY, grown, idsBefore, messages, newTurn, path, restored, versions, without, type Chunk, type Tree, type Turn,
} from "../src/chat/turns";

function talk(...said: readonly (readonly [Turn["role"], string])[]): Tree {
  return said.reduce((tree, [role, text]) => added(tree, newTurn(tree, path(tree).at(-1)?.id ?? 0, role, { text })), EMPTY);
}

const texts = (tree: Tree): string[] => path(tree).map((turn) => turn.text);
const chunk = (choice: object, beside: object = {}): Chunk => ({ choices: [choice], ...beside }) as Chunk;

describe("a conversation", () => {
  it("keeps every version of a turn, with what followed each", () => {
    let tree = talk(["user", "Hi"], ["assistant", "Hello"], ["user", "How?"], ["assistant", "Fine"]);
    const [, , third] = path(tree);
    tree = added(tree, newTurn(tree, third?.parent ?? 0, "user", { text: "Who?" }));
    expect(texts(tree)).toEqual(["Hi", "Hello", "Who?"]);
    expect(versions(tree, third?.parent ?? 0).map((turn) => turn.text)).toEqual(["How?", "Who?"]);
    tree = { ...tree, chosen: { ...tree.chosen, [third?.parent ?? 0]: third?.id ?? 0 } };
    expect(texts(tree)).toEqual(["Hi", "Hello", "How?", "Fine"]);
    expect(path(tree, third?.id).map((turn) => turn.text)).toEqual(["Hi", "Hello", "How?"]);
  });
  it("goes back to what is left where a turn is taken out", () => {
    const tree = talk(["user", "Hi"], ["assistant", "Hello"]);
    const other = added(tree, newTurn(tree, 1, "assistant", { text: "Hey" }));
    expect(texts(other)).toEqual(["Hi", "Hey"]);
    expect(texts(without(other, 3))).toEqual(["Hi", "Hello"]);
  });
  it("is left unfinished where the page was left", () => {
    const tree = changed(talk(["user", "Hi"], ["assistant", "Hel"]), 2, (turn) => ({ ...turn, state: "coming" }));
    expect(path(restored(tree)).map((turn) => turn.state)).toEqual(["whole", "unfinished"]);
  });
  it("becomes messages, of whose calls those that broke off are left out", () => {
    const calls = [{ id: "call_1", name: "f", arguments: '{"a":1}' }, { id: "call_2", name: "g", arguments: '{"a' }];
    let tree = talk(["user", "Hi"]);
    tree = added(tree, newTurn(tree, 1, "assistant", { calls }));
    tree = added(tree, newTurn(tree, 2, "tool", { results: { call_1: "sunny" } }));
    expect(messages(path(tree), " Be brief ")).toEqual([
      { role: "system", content: " Be brief " },
      { role: "user", content: "Hi" },
      { role: "assistant", content: null, tool_calls: [{ id: "call_1", type: "function", function: { name: "f", arguments: '{"a":1}' } }] },
      { role: "tool", tool_call_id: "call_1", content: "sunny" },
    ]);
    expect(messages(path(talk(["user", "Hi"])), "  ")).toHaveLength(1);
  });
});

describe("a streamed answer", () => {
  it("grows by text, ids and their spelling", () => {
    const logprobs = { content: [{ token: " a", logprob: -0.5, bytes: [32, 97] }, { token: "\ufffd", logprob: -1, bytes: [240, 159] }] };
    const told = [
      chunk({ delta: { role: "assistant", content: "" } }, { prompt_token_ids: [1, 2] }),
      chunk({ delta: { content: " a" }, token_ids: [7, 8], logprobs }),
      chunk({ delta: {}, finish_reason: "length" }),
      chunk({}, { choices: [] }),
    ];
    const turn = told.reduce(grown, newTurn(EMPTY, 0, "assistant"));
    expect(turn).toMatchObject({ text: " a", promptIds: [1, 2], reason: "length" });
    expect(turn.tokens).toEqual([{ id: 7, text: " a", logprob: -0.5 }, { id: 8, text: "\\xf0\\x9f", logprob: -1 }]);
    expect(idsBefore(turn, 1)).toEqual([1, 2, 7]);
  });
  it("grows by the events of completions, too", () => {
    const told = [
      chunk({ text: "", token_ids: [], prompt_token_ids: [5] }),
      chunk({ text: " b", token_ids: [9], logprobs: { tokens: [" b"], token_logprobs: [-2] }, finish_reason: "stop" }),
    ];
    const turn = told.reduce(grown, newTurn(EMPTY, 0, "assistant"));
    expect(turn).toMatchObject({ text: " b", promptIds: [5], reason: "stop", tokens: [{ id: 9, text: " b", logprob: -2 }] });
  });
  it("has calls, whose arguments come in pieces", () => {
    const call = (index: number, of: object): Chunk => chunk({ delta: { tool_calls: [{ index, ...of }] } });
    const told = [
      call(0, { id: "call_1", type: "function", function: { name: "f", arguments: "" } }),
      call(0, { function: { arguments: '{"a":' } }),
      call(0, { function: { arguments: "1}" } }),
      call(1, { id: "call_2", type: "function", function: { name: "g", arguments: "" } }),
    ];
    expect(told.reduce(grown, newTurn(EMPTY, 0, "assistant")).calls).toEqual([
      { id: "call_1", name: "f", arguments: '{"a":1}' },
      { id: "call_2", name: "g", arguments: "" },
    ]);
  });
  it("is cut into events wherever the network cuts it", () => {
    const sent = 'data: {"a":1}\n\n: ping\n\ndata: {"b":"data: x"}\n\ndata: [DONE]\n\n';
    for (let size = 1; size < 20; size++) {
      const events = new Events();
      const found: string[] = [];
      for (let at = 0; at < sent.length; at += size) found.push(...events.push(sent.slice(at, at + size)));
      expect(found).toEqual(['{"a":1}', '{"b":"data: x"}', "[DONE]"]);
    }
  });
});

describe("a link", () => {
  const view = { stage: "lens", layer: 0, head: 0, pos: 2, text: "x", bos: true, fields: {} };

  it("names tokens by their ids, and the adapter", () => {
    const link = writeLink({ ...view, ids: [1, 49151, 7], adapter: "mine" });
    expect(link).toContain("ids=1-49151-7");
    expect(readLink(link)).toEqual({ view: { ...view, bos: undefined, ids: [1, 49151, 7], adapter: "mine" } });
  });
  it("leaves out what are no ids", () => {
    for (const ids of ["", "-1", "1--2", "1,2", "x", "12345678"]) expect(readLink(`#ids=${ids}`).view.ids).toBeUndefined();
  });
});
