/** The room of a lesson: a teacher's texts and questions, where the server was started with a lesson file. */
import type { ViewEntry } from "../view";

export const lesson: readonly ViewEntry[] = [
  { id: "lesson", title: "Lesson", component: () => import("./LessonPage.svelte"), uses: [] },
];
