/** The page's rooms, each with its views. To add a view: write its component, and a line in the list of its room. */
import { asking } from "./ask";
import { building } from "./build";
import { chat } from "./chat";
import { comparisons } from "./compare";
import { home } from "./home";
import { course } from "./learn";
import { lesson } from "./lesson";
import { stages } from "./stages";
import type { ViewEntry } from "./view";

interface Room {
  title: string;
  views: readonly ViewEntry[];
  /** Whether its views look at the text that stands above: its line and its tokens are shown. */
  hasText: boolean;
  /** Whether the picture of the pass stands above its views, each of which is a place in it. */
  hasPicture?: boolean;
  /** Whether each of its views is a whole page, without the line of text and the list of views. */
  isPlain?: boolean;
  /** Whether it is there only where the server has a lesson. */
  isOfLesson?: boolean;
}

export const rooms: readonly Room[] = [
  { title: "Start", views: home, hasText: true, isPlain: true },
  { title: "Lesson", views: lesson, hasText: true, isPlain: true, isOfLesson: true },
  { title: "Follow", views: stages, hasText: true, hasPicture: true },
  { title: "Learn", views: course, hasText: false },
  { title: "Ask", views: asking, hasText: true },
  { title: "Compare", views: comparisons, hasText: true },
  { title: "Build", views: building, hasText: false },
  { title: "Chat", views: chat, hasText: false },
];

/** The room that has a view; the first where none has. */
export function roomOf(stage: string): Room {
  return rooms.find((room) => room.views.some((view) => view.id === stage)) ?? (rooms[0] as Room);
}
