/** The course in the page: the path for who begins, a view for each chapter of docs/learn, and the glossary. A chapter's text is loaded when it is opened. */
import { chapters } from "virtual:course";
import type { ViewEntry } from "../view";

export const course: readonly ViewEntry[] = [
  { id: "start", title: "Start here", component: () => import("./Start.svelte"), uses: [], leads: true },
  ...chapters.map(({ id, title }, i) => ({ id, number: i + 1, title, component: () => import("./Chapter.svelte"), uses: [] })),
  { id: "glossary", title: "Glossary", component: () => import("./Glossary.svelte"), uses: [] },
];
