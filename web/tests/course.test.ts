import { readdirSync, readFileSync } from "node:fs";
import { expect, describe, it } from "vitest";
import { readCourse } from "../plugins/course";
import { missing, partsOf, readChapter, readGlossary, slug, viewsOf, type Part } from "../plugins/markdown";
import { pieces } from "../src/learn/folds";
import { readLink } from "../src/lib/link";
import { placeOf } from "../src/scene/places/stations";

const { glossary, chapters } = readCourse("../docs/learn");
const files = (folder: string): string[] =>
  readdirSync(folder, { recursive: true, encoding: "utf8" }).filter((name) => /\.(svelte|ts)$/.test(name)).map((name) => `${folder}/${name}`);
const source = files("src").map((name) => readFileSync(name, "utf8")).join("\n");
const used = [...source.matchAll(/<Term of="([^"]+)"/g)].map((found) => found[1] as string);
const linked = chapters.flatMap((one) => one.refers).flatMap((to) => (to.startsWith("glossary#") ? [to.slice("glossary#".length)] : []));
/** Views that text leads to, by their ids: what stands in a room's list, and the chapters. */
const listed = (folder: string): string[] => [...readFileSync(`src/${folder}/index.ts`, "utf8").matchAll(/\bid: "([a-z-]+)"/g)].map((found) => found[1] as string);
const rooms = readdirSync("src", { withFileTypes: true }).filter((one) => one.isDirectory() && readdirSync(`src/${one.name}`).includes("index.ts"));

describe("the course", () => {
  it("has a glossary whose words the page and the chapters use, all of them", () => {
    expect(used.length).toBeGreaterThan(20);
    expect(used.filter((id) => !(id in glossary))).toEqual([]);
    expect(Object.keys(glossary).filter((id) => !used.includes(id) && !linked.includes(id))).toEqual([]);
  });
  it("says a word in one or two sentences, and each once", () => {
    const names = Object.values(glossary).map((entry) => entry.name);
    expect(new Set(names.map((name) => name.toLowerCase())).size).toBe(names.length);
    for (const { name, text } of Object.values(glossary)) {
      expect(text, name).toMatch(/^[A-Z].*\.$/);
      expect(text.split(/(?<=\.) /).length, name).toBeLessThanOrEqual(2);
    }
  });
  it("leads to views that are there, and every stage has a section that speaks of it", () => {
    const there = rooms.flatMap((one) => listed(one.name));
    expect([...viewsOf(chapters)].filter((id) => !there.includes(id))).toEqual([]);
    const spoken = chapters.flatMap((one) => one.sections.flatMap((section) => section.stages));
    expect(listed("stages").filter((id) => !spoken.includes(id))).toEqual([]);
  });
  it("has live figures in every chapter, of stages that are there and at places within the course's model", () => {
    for (const chapter of chapters) {
      const links = partsOf(chapter).flatMap((part) => (part.kind === "figure" ? [part.link] : []));
      expect(links.length, chapter.id).toBeGreaterThan(0);
      for (const link of links) {
        const { stage = "", layer = 0, head = 0, pos = 0, text = "", fields = {} } = readLink(link).view;
        expect(listed("stages"), link).toContain(stage);
        expect(text.split(" ").length, link).toBeGreaterThan(pos);
        expect(layer < 30 && head < 9, link).toBe(true);
        const place = placeOf(stage, fields, { layer, head, pos });
        expect(place.depth === 0 || place.block !== undefined || place.depth === 1, link).toBe(true);
      }
    }
  });
  it("opens every chapter with a question and an example by hand, and ends it in exercises whose solutions are hidden", () => {
    for (const { title, opening, sections } of chapters) {
      expect(opening[0]?.kind === "prose" && opening[0].html, title).toMatch(/^<p><strong>[^<]+\?<\/strong>/);
      expect(sections[0]?.title, title).toMatch(/by hand$/i);
      const parts = sections.at(-1)?.parts ?? [];
      expect(sections.at(-1)?.title, title).toBe("Exercises");
      const numbers = parts.flatMap((one) => (one.kind === "prose" ? [...one.html.matchAll(/<strong>(\d)\.<\/strong>/g)].map((found) => found[1]) : []));
      expect(numbers.length, title).toBeGreaterThan(1);
      expect(parts.flatMap((one) => (one.kind === "solution" ? [one.title] : [])), title).toEqual(numbers.map((number) => `Solution ${number}`));
    }
  });
});

describe("a chapter", () => {
  const page = "# Ids\n\nOpening.\n\n## First, `x`\n\n<!-- stages: map, rope -->\n\nA [token](glossary.md#token).\n";
  it("is its opening, and sections of prose and code", () => {
    const found = readChapter("1-ids.md", `${page}\n\`\`\`python\nprint(1 < 2)\n\`\`\`\n\n## Second\n\nSee \`#stage=rope&pos=2\`.\n`);
    expect([found.id, found.title]).toEqual(["ids", "Ids"]);
    expect(found.opening).toEqual([{ kind: "prose", html: "<p>Opening.</p>" }]);
    expect(found.sections.map((one) => [one.id, one.stages, one.parts.length])).toEqual([["first-x", ["map", "rope"], 2], ["second", [], 1]]);
    expect(found.sections[0]?.parts).toEqual([
      { kind: "prose", html: '<p>A <span data-term="token">token</span>.</p>' },
      { kind: "code", language: "python", text: "print(1 < 2)" },
    ]);
    expect(found.sections[1]?.parts[0]).toEqual({
      kind: "prose",
      html: '<p>See <a class="see" href="#stage=rope&amp;pos=2">#stage=rope&amp;pos=2</a>.</p>',
    });
  });
  it("shows a figure in place of what a block of Python prints, and folds the block", () => {
    const figure: Part = { kind: "figure", link: "#stage=rope&pos=2&text=The%20cat" };
    const [python, output, prose]: Part[] = [{ kind: "code", language: "python", text: "x" }, { kind: "code", language: "output", text: "1" }, { kind: "prose", html: "<p>y</p>" }];
    const text = `${page}\n<!-- figure: ${figure.link} -->\n\`\`\`python\nx\n\`\`\`\n\n\`\`\`output\n1\n\`\`\`\n`;
    expect(readChapter("1-ids.md", text).sections[0]?.parts.slice(1)).toEqual([figure, python, output]);
    expect(pieces([figure, python, output, prose] as Part[])).toEqual([figure, { kind: "fold", of: [python, output] }, prose]);
    expect(pieces([prose, python, output, figure] as Part[])).toEqual([prose, { kind: "fold", of: [python] }, output, figure]);
    expect(() => readChapter("1-ids.md", `${page}\n<!-- figure: https://elsewhere -->\n`)).toThrow("no HTML");
  });
  it("hides solutions, with the code and the links in them", () => {
    const hidden = "<details>\n<summary>Solution 1</summary>\n\nSee [a](#first-x).\n\n```python\nx\n```\n\n</details>\n";
    const found = readChapter("1-ids.md", `${page}\n${hidden}\nMore.\n`);
    const [, solution, more] = found.sections[0]?.parts ?? [];
    expect(solution).toMatchObject({ kind: "solution", title: "Solution 1", parts: [{ kind: "prose" }, { kind: "code", text: "x" }] });
    expect(more).toEqual({ kind: "prose", html: "<p>More.</p>" });
    expect(found.refers).toContain("ids#first-x");
    expect(partsOf(found).map((one) => one.kind)).toEqual(["prose", "prose", "prose", "code", "prose"]);
    for (const wrong of [hidden.replace("</details>", ""), hidden.replace("Solution 1", "<b>1</b>")]) {
      expect(() => readChapter("1-ids.md", `${page}\n${wrong}`), wrong).toThrow();
    }
  });
  it("is told where it refers to what is not there", () => {
    const found = readChapter("1-ids.md", `${page}[a](glossary.md#nothing) [b](#second) [c](2-more.md) [d](#first-x) [e](../guides/train.md)\n`);
    expect(missing([found], readGlossary("## Text\n\n### token\n\nA piece.\n"))).toEqual(["ids: glossary#nothing", "ids: ids#second", "ids: more"]);
  });
  it("brings no style, no script and no picture into the page", () => {
    for (const wrong of ["<b>x</b>", "<script>x</script>", "a <i>b</i>", "![x](y.png)"]) {
      expect(() => readChapter("1-ids.md", `${page}\n${wrong}\n`), wrong).toThrow("no HTML");
    }
    const table = readChapter("1-ids.md", "# T\n\n## S\n\n| a | b |\n|---|--:|\n| 1 | <2 |\n").sections[0]?.parts[0];
    expect(table?.kind === "prose" && table.html).not.toMatch(/style|<2/);
    for (const one of chapters) expect(JSON.stringify(one), one.id).not.toMatch(/ style=|<script|<img/);
  });
});

it("a glossary's entry is one paragraph of plain text", () => {
  for (const wrong of ["A *piece*.", "One.\n\nTwo.", "- a list", "`code`"]) expect(() => readGlossary(`## Text\n\n### token\n\n${wrong}\n`), wrong).toThrow("token");
  expect(readGlossary("# G\n\nHello.\n\n## Text\n\n### o_proj\n\nA\nmatrix.\n")).toEqual({ o_proj: { name: "o_proj", group: "Text", text: "A matrix." } });
  expect(slug("What is o_proj? It's the sum: (top-k)")).toBe("what-is-o_proj-its-the-sum-top-k");
});
