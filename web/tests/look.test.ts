/** The page's look is one scale: sizes of text are those that `app.css` names. */
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { expect, test } from "vitest";

const SOURCES = join(import.meta.dirname, "../src");
const styles = readdirSync(SOURCES, { recursive: true, encoding: "utf8" })
  .filter((name) => /\.(svelte|css)$/.test(name))
  .map((name) => [name, readFileSync(join(SOURCES, name), "utf8")] as const);

test("text has one of five sizes", () => {
  const others = styles.flatMap(([name, text]) =>
    [...text.matchAll(/font(?:-size)?:\s*(?:\d{3} )?([\d.]+rem)/g)].map(([, size]) => `${name}: ${size}`),
  );
  expect(others).toEqual(["app.css: 1rem"]); // what the scale is of
});

test("a link is reached by Tab", () => {
  const links = styles.flatMap(([name, text]) => [...text.matchAll(/<a\s[^>]*tabindex/g)].map(() => name));
  expect(links).toEqual([]);
});
