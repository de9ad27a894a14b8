import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { messages, newTurn, EMPTY } from "../src/chat/turns";
import { served, tab } from "./page";

beforeEach(() => {
  vi.resetModules();
  tab();
});
afterEach(() => vi.unstubAllGlobals());

describe("a conversation whose answer breaks off", () => {
  it("asks for the same one when it is tried again, whatever the fields say by then", async () => {
    const bodies: Record<string, unknown>[] = [];
    const token = { choices: [{ delta: { content: "Hel" }, token_ids: [7], logprobs: { content: [{ token: "Hel", logprob: -1, bytes: [] }] } }] };
    served((_, __, body) => {
      bodies.push(body as Record<string, unknown>);
      return { body: `data: ${JSON.stringify(token)}\n\n` };
    });
    const { conversation } = await import("../src/chat/conversation.svelte");
    const { sampling } = await import("../src/lib/sampling.svelte");
    conversation.choices.system = "Be brief";
    conversation.draft = "Hi";
    await conversation.send(true);
    const [, answer] = conversation.turns;
    expect(answer).toMatchObject({ state: "unfinished", text: "Hel", why: "the stream ended before the answer did" });
    sampling.set({ temperature: 1.7, seed: 5 });
    conversation.choices.system = "Ramble";
    conversation.choices.maxTokens = "9";
    if (answer) await conversation.again(answer, true);
    expect(bodies[1]).toEqual(bodies[0]);
    expect(bodies[1]).toMatchObject({ temperature: 0.8, seed: 0, max_tokens: 256, messages: [{ role: "system", content: "Be brief" }, { role: "user", content: "Hi" }] });
  });
  it("is unfinished, and can be tried again, whatever broke", async () => {
    vi.stubGlobal("fetch", () => Promise.resolve(new Response('data: {"choices":null}\n\n')));
    const { conversation } = await import("../src/chat/conversation.svelte");
    conversation.draft = "Hi";
    await conversation.send(true);
    expect(conversation.turns.at(-1)?.state).toBe("unfinished");
    expect(conversation.isComing).toBe(false);
  });
});

describe("messages", () => {
  it("leave out an answer that broke off before its first word", () => {
    const said = [newTurn(EMPTY, 0, "user", { text: "Hi" }), newTurn(EMPTY, 1, "assistant", { state: "unfinished" }), newTurn(EMPTY, 2, "user", { text: "Well?" })];
    expect(messages(said, "")).toEqual([{ role: "user", content: "Hi" }, { role: "user", content: "Well?" }]);
  });
});
