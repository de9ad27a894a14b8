/** The layer and head that attention opens on: those in which a token looks back most, until others are chosen. */
import type { ModelView, PassView } from "../schema";
import { api } from "./api";
import { Resource } from "./resource.svelte";
import { session } from "./session.svelte";
import { tellingLook, type Look } from "./telling";

export async function lookOf(pass: PassView, { shape: { L, N } }: ModelView, query: number): Promise<Look> {
  const { values } = await api.activation(pass, "pattern", { position: query });
  return tellingLook(values, { layers: L, heads: N, query, texts: pass.tokens.map(({ text }) => text) });
}

/** For a view that shows one head: where neither a link nor a reader has chosen one, it is the most telling. */
export function opensOnTellingHead(): void {
  const found = new Resource(() => {
    const { pass, model, pos, isFree } = session;
    return isFree && pass && model && pos > 1 ? lookOf(pass, model, pos).then((look) => ({ pass, pos, look })) : null;
  });
  $effect(() => {
    const { pass, pos, look } = found.value ?? {};
    if (look && session.isFree && pass === session.pass && pos === session.pos) session.choose(look);
  });
}
