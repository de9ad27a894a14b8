import { readFileSync } from "node:fs";
import { execFileSync } from "node:child_process";
import { expect, it } from "vitest";

it("schema.ts is made of schema.json", () => {
  const { scripts } = JSON.parse(readFileSync("package.json", "utf8")) as { scripts: { schema: string } };
  const [, banner] = /--bannerComment '([^']*)'/.exec(scripts.schema) ?? [];
  const words = ["--input", "src/schema.json", "--unreachableDefinitions", "--no-additionalProperties", "--bannerComment", banner ?? ""];
  const made = execFileSync("node_modules/.bin/json2ts", words, { encoding: "utf8" });
  expect(readFileSync("src/schema.ts", "utf8"), "run: npm run schema").toBe(made);
});
