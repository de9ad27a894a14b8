import { afterEach, expect, test, vi } from "vitest";
import { openSource } from "../src/engine/source";

const FILE = new URL("https://models.example/a.gguf");
const whole = (): Response => new Response(new Uint8Array([1, 2, 3]), { status: 206, headers: { "Content-Range": "bytes 0-2/3" } });

function answering(...answers: (() => Response)[]): { times: number } {
  const asked = { times: 0 };
  vi.stubGlobal("fetch", () => Promise.resolve((answers[asked.times++] ?? whole)()));
  return asked;
}

afterEach(() => vi.unstubAllGlobals());

test.each([408, 429, 500, 503])("a server that answers %i is asked again", async (status) => {
  const asked = answering(() => new Response(null, { status }));
  const reader = await openSource(FILE, undefined);
  expect([...(await reader.read(0, 3))]).toEqual([1, 2, 3]);
  expect(asked.times).toBe(2);
});

test.each([[401, "public"], [403, "public"], [404, "address"], [410, "address"]])("one that answers %i is not, and the error says what to check", async (status, check) => {
  const asked = answering(() => new Response(null, { status }));
  const error = (await openSource(FILE, undefined).catch((refused: unknown) => refused)) as { code: string; message: string };
  expect(error.code).toBe("network");
  for (const part of ["a.gguf", String(status), check]) expect(error.message).toContain(part);
  expect(asked.times).toBe(1);
});
