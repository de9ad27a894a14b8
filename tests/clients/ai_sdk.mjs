// Vercel's AI SDK with one of its providers: a tool is called, and its result used; run by run.py.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const installed = createRequire(`${process.env.NODE_PATH}/x.js`);
const load = (name) => import(pathToFileURL(installed.resolve(name)).href);

const { generateText, tool, stepCountIs } = await load("ai");
const { z } = await load("zod");
const baseURL = process.env.OPENAI_BASE_URL;
const apiKey = "none";

const makers = {
  openai: async () => (await load("@ai-sdk/openai")).createOpenAI({ baseURL, apiKey })("small"),
  "openai-chat": async () => (await load("@ai-sdk/openai")).createOpenAI({ baseURL, apiKey }).chat("small"),
  compatible: async () =>
    (await load("@ai-sdk/openai-compatible")).createOpenAICompatible({ name: "llamarium", baseURL, apiKey })("small"),
  anthropic: async () => (await load("@ai-sdk/anthropic")).createAnthropic({ baseURL, apiKey })("small"),
};

const { text } = await generateText({
  model: await makers[process.argv[2]](),
  prompt: "Join llamarium and 7421 by a hyphen, and repeat the result.",
  tools: {
    join: tool({
      description: "Join two texts",
      inputSchema: z.object({
        left: z.string(),
        right: z.string(),
        labels: z.record(z.string(), z.string()).optional(),
      }),
      execute: async ({ left, right }) => `${left}-${right}`,
    }),
  },
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "auto" }),
  stopWhen: stepCountIs(3),
});
console.log(text);
