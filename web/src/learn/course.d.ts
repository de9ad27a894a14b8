/** What `plugins/course.ts` makes of docs/learn. */
declare module "virtual:course" {
  export const glossary: import("../../plugins/markdown").Glossary;
  export const chapters: readonly import("../../plugins/course").ChapterEntry[];
}
