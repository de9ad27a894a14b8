/** The room of conversations: one's own, and those of the server's other clients. */
import type { ViewEntry } from "../view";

export const chat: readonly ViewEntry[] = [
  { id: "chat", title: "Chat", component: () => import("./Chat.svelte"), uses: [] },
  { id: "requests", title: "Live requests", component: () => import("./Live.svelte"), uses: [] },
];
