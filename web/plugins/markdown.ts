/** The course of docs/learn as data: the glossary's entries, and chapters of sections. Runs where the page is built, and in its tests. */

import { posix } from "node:path";
import { Marked, type Token, type Tokens } from "marked";

export interface Entry {
  name: string;
  /** The heading that it stands under. */
  group: string;
  text: string;
}

/** The glossary's entries by their ids, in its order. */
export type Glossary = Readonly<Record<string, Entry>>;

/** A figure is a place of the picture, as links name it: the page shows it live, GitHub nothing. A solution is hidden until it is opened. */
export type Part =
  | { kind: "prose"; html: string }
  | { kind: "code"; language: string; text: string }
  | { kind: "figure"; link: string }
  | { kind: "solution"; title: string; parts: readonly Part[] };

export interface Section {
  id: string;
  title: string;
  /** The views that it speaks of, by what links call them. */
  stages: readonly string[];
  parts: readonly Part[];
}

export interface Chapter {
  id: string;
  title: string;
  /** What stands before the first section. */
  opening: readonly Part[];
  sections: readonly Section[];
  /** What it refers to in the course: `glossary#rope`, `from-text-to-vectors#text-becomes-ids`. */
  refers: readonly string[];
}

/** The anchor of a heading, as GitHub makes it. */
export function slug(heading: string): string {
  return heading.toLowerCase().replace(/[^\p{L}\p{N}\s_-]/gu, "").trim().replaceAll(/\s/g, "-");
}

/** The id of a chapter: its file's name, without the number that orders the files. */
export function chapterId(file: string): string {
  return file.replace(/^\d+-/, "").replace(/\.md$/, "");
}

// --- the glossary ---

/** Read the glossary: an entry is a heading of the third level and one paragraph of plain text. */
export function readGlossary(markdown: string): Glossary {
  const found: Record<string, Entry> = {};
  const tokens = new Marked().lexer(markdown).filter((one) => one.type !== "space");
  let group = "";
  for (const [at, token] of tokens.entries()) {
    if (!isHeading(token) || token.depth === 1) continue;
    if (token.depth === 2) group = token.text;
    else found[slug(token.text)] = { name: token.text, group, text: sentences(token.text, tokens[at + 1], tokens[at + 2]) };
  }
  return found;
}

function sentences(name: string, said: Token | undefined, next: Token | undefined): string {
  const isPlain = said?.type === "paragraph" && said.tokens?.every((one) => one.type === "text");
  if (!isPlain || (next && next.type !== "heading")) throw new Error(`glossary: "${name}" is not one paragraph of plain text`);
  return said.raw.trim().replaceAll("\n", " ");
}

const isHeading = (token: Token): token is Tokens.Heading => token.type === "heading";

// --- chapters ---

/** Read a chapter. `file` is its name, `1-from-text-to-vectors.md`. */
export function readChapter(file: string, markdown: string): Chapter {
  const refers: string[] = [];
  const marked = renderer(chapterId(file), refers);
  const [first, ...tokens] = marked.lexer(markdown);
  if (!first || !isHeading(first) || first.depth !== 1) throw new Error(`${file}: does not begin with its title`);
  const starts = tokens.flatMap((one, at) => (isHeading(one) && one.depth === 2 ? [at] : []));
  const parts = (from: number, to?: number): Part[] => divide(marked, tokens.slice(from, to));
  return {
    id: chapterId(file),
    title: first.text,
    opening: parts(0, starts[0]),
    sections: starts.map((start, i) => {
      const title = (tokens[start] as Tokens.Heading).text;
      return { id: slug(title), title, stages: stagesOf(tokens.slice(start, starts[i + 1])), parts: parts(start + 1, starts[i + 1]) };
    }),
    refers,
  };
}

const STAGES = /^<!-- stages: ([a-z0-9, -]+) -->\s*$/;
const FIGURE = /^<!-- figure: (#stage=[^\s<>]+) -->\s*$/;
/** What hides a solution on GitHub too: the only HTML of a chapter, each on lines of its own. */
const SOLUTION = /^<details>\n<summary>([^<>&]+)<\/summary>\s*$/;
const SOLUTION_END = /^<\/details>\s*$/;
const SKIP = /^<!-- test: skip \(.*\) -->\s*$/;

const stagesOf = (tokens: readonly Token[]): string[] =>
  tokens.flatMap((one) => (one.type === "html" ? (STAGES.exec(one.raw)?.[1]?.split(", ") ?? []) : []));

/** Divide what lies between two headings into prose, blocks of code and figures; other comments are left out. */
function divide(marked: Marked, tokens: readonly Token[]): Part[] {
  const found: Part[] = [];
  let prose: Token[] = [];
  let rest = tokens;
  const end = (): void => {
    const html = marked.parser(prose).trim();
    if (html) found.push({ kind: "prose", html });
    prose = [];
  };
  for (let token = rest[0]; token; token = rest[0]) {
    rest = rest.slice(1);
    if (token.type === "code") {
      end();
      found.push({ kind: "code", language: (token as Tokens.Code).lang ?? "", text: (token as Tokens.Code).text });
    } else if (token.type !== "html") prose.push(token);
    else if (FIGURE.test(token.raw)) {
      end();
      found.push({ kind: "figure", link: FIGURE.exec(token.raw)?.[1] ?? "" });
    } else if (SOLUTION.test(token.raw)) {
      end();
      const length = rest.findIndex((one) => one.type === "html" && SOLUTION_END.test(one.raw));
      if (length < 0) throw new Error(`a solution does not end: ${token.raw}`);
      found.push({ kind: "solution", title: SOLUTION.exec(token.raw)?.[1] ?? "", parts: divide(marked, rest.slice(0, length)) });
      rest = rest.slice(length + 1);
    } else if (!STAGES.test(token.raw) && !SKIP.test(token.raw)) throw new Error(`a chapter holds no HTML: ${token.raw}`);
  }
  end();
  return found;
}

const escaped = (text: string): string =>
  text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;").replaceAll('"', "&quot;");

/** What makes HTML that the page's policy allows: no styles, no scripts, no pictures. Links lead to where the page has it. */
function renderer(chapter: string, refers: string[]): Marked {
  const refuse = (token: Token): string => {
    throw new Error(`a chapter holds no HTML and no pictures: ${token.raw}`);
  };
  return new Marked({
    renderer: {
      html: refuse,
      image: refuse,
      codespan: ({ text }) =>
        text.startsWith("#stage=") ? `<a class="see" href="${escaped(text)}">${escaped(text)}</a>` : `<code>${escaped(text)}</code>`,
      link({ href, tokens }) {
        return linked(chapter, refers, href, this.parser.parseInline(tokens));
      },
      tablecell({ tokens, header, align }) {
        const name = header ? "th" : "td";
        return `<${name} class="${align === "right" ? "right" : "left"}">${this.parser.parseInline(tokens)}</${name}>`;
      },
    },
  });
}

/** A glossary's word becomes a term, a chapter a view, and what the page has not is named. */
function linked(chapter: string, refers: string[], href: string, said: string): string {
  const [file = "", anchor = ""] = href.split("#");
  if (/^https:/.test(href)) return `<a href="${escaped(href)}" rel="noreferrer">${said}</a>`;
  if (file.startsWith("../")) return `${said} (<code>${escaped(posix.join("docs/learn", file))}</code>)`;
  const id = file ? chapterId(file) : chapter;
  refers.push(anchor ? `${id}#${anchor}` : id);
  if (id === "glossary" && anchor) return `<span data-term="${escaped(anchor)}">${said}</span>`;
  return `<a href="#stage=${escaped(id)}${anchor ? `&amp;section=${escaped(anchor)}` : ""}">${said}</a>`;
}

// --- what holds it together ---

const unfolded = (part: Part): readonly Part[] => (part.kind === "solution" ? part.parts.flatMap(unfolded) : [part]);

/** All parts of a chapter, those of its solutions too. */
export const partsOf = ({ opening, sections }: Pick<Chapter, "opening" | "sections">): Part[] =>
  [...opening, ...sections.flatMap((section) => section.parts)].flatMap(unfolded);

/** Every view that chapters link to, by what links call it. */
export function viewsOf(chapters: readonly Chapter[]): Set<string> {
  const parts = chapters.flatMap(partsOf);
  const links = parts.flatMap((part) => (part.kind === "prose" ? [...part.html.matchAll(/class="see" href="#stage=([a-z-]+)/g)] : []));
  return new Set(links.map((link) => link[1] as string));
}

/** What chapters refer to and the course does not have. */
export function missing(chapters: readonly Chapter[], glossary: Glossary): string[] {
  const there = new Set(["glossary", ...Object.keys(glossary).map((id) => `glossary#${id}`)]);
  for (const { id, sections } of chapters) for (const place of [id, ...sections.map((one) => `${id}#${one.id}`)]) there.add(place);
  return chapters.flatMap((one) => one.refers.filter((to) => !there.has(to)).map((to) => `${one.id}: ${to}`));
}
