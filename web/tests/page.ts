/** The few things of a browser that the page's own state needs, for tests without one. */
import { vi } from "vitest";

export interface Said {
  status?: number;
  body?: unknown;
  headers?: Record<string, string>;
}

type Answer = (method: string, path: string, body: unknown) => Said | Promise<Said>;

/** A server that answers so; returns what was asked of it, as `POST /inspect/passes`. */
export function served(answer: Answer): string[] {
  const asked: string[] = [];
  vi.stubGlobal("fetch", async (path: string, options: RequestInit = {}) => {
    const { method = "GET", body } = options;
    asked.push(`${method} ${path}`);
    const said = await answer(method, path, typeof body === "string" ? (JSON.parse(body) as unknown) : undefined);
    const text = typeof said.body === "string" ? said.body : JSON.stringify(said.body ?? {});
    return new Response(text, { status: said.status ?? 200, headers: said.headers ?? {} });
  });
  return asked;
}

/** A tab at this address, with a memory and a history. */
export function tab(hash = ""): void {
  const memory = new Map<string, string>();
  vi.stubGlobal("sessionStorage", {
    getItem: (name: string) => memory.get(name) ?? null,
    setItem: (name: string, value: string) => memory.set(name, value),
    removeItem: (name: string) => memory.delete(name),
  });
  vi.stubGlobal("location", { hash, origin: "http://page", pathname: "/" });
  vi.stubGlobal("history", { replaceState: (_: unknown, __: string, link: string) => (location.hash = link) });
  vi.stubGlobal("addEventListener", () => undefined);
}
