/** Gives the page the course of docs/learn: the glossary and the chapters' titles at once, each chapter's text when it is opened. */

import { readdirSync, readFileSync } from "node:fs";
import { join, resolve } from "node:path";
import type { Plugin } from "vite";
import { missing, readChapter, readGlossary, type Chapter, type Glossary, type Section } from "./markdown.ts";

/** A chapter as the page lists it; its text comes when it is asked for. */
export interface ChapterEntry {
  id: string;
  title: string;
  sections: readonly Pick<Section, "id" | "title" | "stages">[];
  load: () => Promise<{ default: Pick<Chapter, "opening" | "sections"> }>;
}

/** Read the course, or say what is wrong with it. */
export function readCourse(folder: string): { glossary: Glossary; chapters: Chapter[]; files: string[] } {
  const files = readdirSync(folder).filter((name) => /^\d+-.*\.md$/.test(name)).sort();
  const read = (name: string): string => readFileSync(join(folder, name), "utf8");
  const glossary = readGlossary(read("glossary.md"));
  const chapters = files.map((name) => readChapter(name, read(name)));
  const lost = missing(chapters, glossary);
  if (lost.length) throw new Error(`the course refers to what is not there: ${lost.join(", ")}`);
  return { glossary, chapters, files: ["glossary.md", ...files].map((name) => join(folder, name)) };
}

const NAME = "virtual:course";

export function course(): Plugin {
  let folder = "";
  return {
    name: "course",
    configResolved(config) {
      folder = resolve(config.root, "../docs/learn");
    },
    resolveId: (id) => (id === NAME || id.startsWith(`${NAME}/`) ? `\0${id}` : null),
    load(id) {
      if (!id.startsWith(`\0${NAME}`)) return null;
      const { glossary, chapters, files } = readCourse(folder);
      for (const file of files) this.addWatchFile(file);
      const asked = chapters.find((one) => id === `\0${NAME}/${one.id}`);
      return asked ? `export default ${JSON.stringify({ opening: asked.opening, sections: asked.sections })};` : listed(glossary, chapters);
    },
  };
}

function listed(glossary: Glossary, chapters: readonly Chapter[]): string {
  const entries = chapters.map((one) => {
    const sections = one.sections.map(({ id, title, stages }) => ({ id, title, stages }));
    const told = JSON.stringify({ id: one.id, title: one.title, sections });
    return `{ ...${told}, load: () => import("${NAME}/${one.id}") }`;
  });
  return `export const glossary = ${JSON.stringify(glossary)};\nexport const chapters = [${entries.join(", ")}];\n`;
}

