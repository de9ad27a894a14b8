/** The course in the page: a view for each chapter of docs/learn, and the glossary. A chapter's text is loaded when it is opened. */
import { chapters } from "virtual:course";
import type { ViewEntry } from "../view";

export const course: readonly ViewEntry[] = [
  ...chapters.map(({ id, title }, i) => ({ id, number: i + 1, title, component: () => import("./Chapter.svelte"), uses: [] })),
  { id: "glossary", title: "Glossary", component: () => import("./Glossary.svelte"), uses: [] },
];
