import { render } from "svelte/server";
import { describe, expect, it } from "vitest";
import { parting } from "../src/chat/live.svelte";
import Prefixes from "../src/chat/Prefixes.svelte";
import type { PrefixView } from "../src/schema";

const CHANGED: PrefixView = {
  number: 7,
  num_tokens: 800,
  matched_tokens: 493,
  is_exact: true,
  reason: "changed",
  message: "a date or time in messages[0].content changed after 493 of 800 tokens",
  field: "messages[0].content",
  other_fields: ["messages[2].content"],
  first_different_token: 493,
  text_before: "Today is ",
  text: "the 2nd",
  earlier_text: "the 1st",
};
const EXTENDED: PrefixView = {
  ...CHANGED, number: 8, reason: "extended", message: "it continues an earlier prompt", field: null, other_fields: [],
  first_different_token: null, text_before: null, text: null, earlier_text: null,
};

/** What the list shows, as HTML without the marks that are not seen. */
const shown = (...prefixes: PrefixView[]): string => render(Prefixes, { props: { prefixes } }).body.replaceAll(/<!--.*?-->/g, "");

describe("the prefixes of the newest prompts", () => {
  it("say the matched tokens, the first different one, its field and the texts around it", () => {
    const html = shown(CHANGED);
    expect(html).toMatch(/data-prefix="7"[^]*493 of 800 tokens match/);
    expect(parting(CHANGED)[0]).toEqual(["first different token", "493"]);
    for (const text of ["first different token", CHANGED.message, "messages[0].content", "messages[2].content", "Today is ", "the 2nd", "the 1st"]) {
      expect(html).toContain(text);
    }
  });
  it("have no place and no texts where nothing differs", () => {
    const html = shown(EXTENDED);
    expect(html).toContain(EXTENDED.message);
    expect(html).not.toContain("<dt");
  });
  it("show text as text", () => {
    const hostile = "<img src=x onerror=alert(1)> &lt;b&gt; </script>";
    const html = shown({ ...CHANGED, text_before: hostile, text: hostile, earlier_text: hostile, field: hostile, message: hostile });
    expect(html).not.toMatch(/<img|<\/script/);
    expect(html.split("&lt;img src=x onerror=alert(1)> &amp;lt;b&amp;gt;").length - 1).toBe(5);
  });
  it("name an earlier text that is not cached any more, and a place that is not exact", () => {
    const one = { ...CHANGED, is_exact: false, earlier_text: null };
    expect(parting(one).at(-1)).toEqual(["the earlier prompt", "not cached any more"]);
    expect(shown(one).match(/not cached any more/g)).toHaveLength(2);
    expect(shown(CHANGED)).not.toContain("not cached any more");
  });
  it("show line ends and tabs", () => {
    expect(parting({ ...CHANGED, text: "a\nb\tc", text_before: "" }).slice(2, 4)).toEqual([["both before it", "∅"], ["this prompt", "a⏎b⇥c"]]);
  });
  it("are none before a prompt of this key", () => {
    expect(shown()).toContain("None so far");
  });
});
