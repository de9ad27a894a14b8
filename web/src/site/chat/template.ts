/**
 * From a dialog to ids, by the model's chat template. As `TemplateFormat` in `tokenizer/chat/template.py`, which says why: the template is a
 * stranger's program, and what people write must not become a control token. So a mark stands in texts that come near to one, and two
 * further renderings prove that the template has not looked at it.
 */
import type { Model } from "../../engine/types";
import { Refused } from "../asked";
import type { Rendering, Written } from "./jinja";
import { Spellings } from "./spellings";

export interface Message {
  readonly role: string;
  readonly content: string;
}

/** Renders a template; a worker does so in a page. */
export type Render = (rendering: Rendering) => Promise<readonly Written[]>;

type Content = string | readonly { readonly type: "text"; readonly text: string }[];
type Variables = Readonly<Record<string, unknown>>;

// What a vocabulary's control tokens say of its dialogs where the file has no template; `tokenizer/chat/named.py` has both.
const BY_TOKENS: readonly { readonly tokens: readonly string[]; readonly template: string }[] = [
  {
    tokens: ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    template: "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
  },
  {
    tokens: ["<|im_start|>", "<|im_end|>"],
    template: "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
  },
];

const MARKS = Array.from({ length: 30 }, (_, i) => String.fromCharCode(0xfdd0 + i)); // noncharacters
const THOUGHTS = /^<\/?(think|thinking|reasoning)>$/; // by which templates tell reasoning from the rest of an answer
const SHOWN = /^<\/?(think|thinking|reasoning|tool_call|tool_calls|tool_response|tools|function)>$/;
const ANSWER = "Qxz7answer";

/** The template of a model's dialogs, or null. */
export function templateOf({ config, control }: Model): string | null {
  return config.chatTemplate ?? BY_TOKENS.find(({ tokens }) => tokens.every((token) => control.has(token)))?.template ?? null;
}

/** How a model's dialogs are written. */
export class ChatTemplate {
  readonly #spellings: Spellings;
  readonly #fixed: Variables;
  #form: Promise<{ isInParts: boolean; ends: readonly number[] }> | undefined;

  constructor(private readonly model: Model, private readonly template: string, private readonly render: Render) {
    this.#spellings = new Spellings(model.control.keys());
    const { bosId, eosId, padId } = model.config;
    const named = Object.entries({ bos_token: bosId, eos_token: eosId, pad_token: padId }).filter(([, id]) => id !== null);
    this.#fixed = { documents: null, tools: null, ...Object.fromEntries(named.map(([name, id]) => [name, model.decode([id as number], { special: true })])) };
  }

  /** The ids of a dialog, up to the beginning of the answer; `Refused` where the template does not write it. */
  async encode(messages: readonly Message[]): Promise<number[]> {
    const { isInParts } = await this.#read();
    const words = JSON.stringify(messages) + this.template;
    const mark = MARKS.find((one) => !words.includes(one));
    if (mark === undefined) throw new Refused(400, "the messages contain all 30 noncharacters U+FDD0 to U+FDED; remove one of them", "chat_format", "messages");
    const variant = (change: (text: string) => string): Variables => ({
      messages: messages.map((one) => ({ role: one.role, content: inForm(this.#changed(one, change), isInParts) })), add_generation_prompt: true,
    });
    const [marked, plain, swapped] = await this.#write([
      variant((text) => this.#spellings.mark(text, mark)), variant((text) => text), variant((text) => this.#spellings.swapEnds(text, mark)),
    ]) as [string, string, string];
    const parts = this.#split(marked);
    const isSame = marked.replaceAll(mark, "") === plain && controlOf(this.#split(swapped)) === controlOf(parts);
    if (!isSame) {
      throw new Refused(400, "a message contains the text of a control token, and this chat template does not keep the two apart; remove it from the message", "chat_format", "messages");
    }
    return this.model.encodeParts(parts.map((part) => (typeof part === "string" ? part.replaceAll(mark, "") : part)));
  }

  /** The control tokens that end a turn, as the template writes them. */
  async ends(): Promise<readonly number[]> {
    return (await this.#read()).ends;
  }

  /** In an answer, which a model wrote, the tokens stay by which the template tells reasoning from the rest. */
  #changed({ role, content }: Message, change: (text: string) => string): string {
    const kept = role === "assistant" ? [...this.model.control.keys()].filter((one) => THOUGHTS.test(one) && this.template.includes(one)) : [];
    if (!kept.length) return change(content);
    return content.split(new RegExp(`(${kept.map((one) => one.replace("/", "\\/")).join("|")})`)).map((part, i) => (i % 2 ? part : change(part))).join("");
  }

  /** Ask the template, once, whether contents are texts or lists of parts, and what it writes behind an answer. */
  #read(): Promise<{ isInParts: boolean; ends: readonly number[] }> {
    return (this.#form ??= this.#probe());
  }

  async #probe(): Promise<{ isInParts: boolean; ends: readonly number[] }> {
    const turns = [["user", "x"], ["assistant", ANSWER], ["user", "x"]] as const;
    const dialogs = [false, true].flatMap((isInParts) => [3, 2].map((count) => ({
      messages: turns.slice(0, count).map(([role, text]) => ({ role, content: inForm(text, isInParts) })), add_generation_prompt: false,
    })));
    const told = (await this.render({ template: this.template, variables: dialogs.map((one) => ({ ...this.#fixed, ...one })) })).map((one) => ("text" in one ? one.text : ""));
    const ends = new Set<number>();
    for (const text of told) {
      const at = text.lastIndexOf(ANSWER);
      const [first] = at < 0 ? [] : this.#split(text.slice(at + ANSWER.length).trimStart());
      if (typeof first === "number" && !SHOWN.test(this.model.decode([first], { special: true }))) ends.add(first);
    }
    const writes = (place: number): boolean => told.slice(place, place + 2).some((text) => text.includes(ANSWER));
    return { isInParts: !writes(0) && writes(2), ends: [...ends] };
  }

  async #write(all: readonly Variables[]): Promise<string[]> {
    const told = await this.render({ template: this.template, variables: all.map((one) => ({ ...this.#fixed, ...one })) });
    return told.map((one) => {
      if ("text" in one) return one.text;
      throw new Refused(400, `the model's chat template: ${one.error}`, "chat_format", "messages");
    });
  }

  /** Texts, and the control tokens between them. */
  #split(text: string): (string | number)[] {
    const { control } = this.model;
    const pattern = new RegExp(`(${[...control.keys()].sort((a, b) => b.length - a.length).map((one) => one.replace(/[\\^$.*+?()[\]{}|/-]/g, "\\$&")).join("|") || "(?!)"})`);
    return text.split(pattern).map((part, i) => (i % 2 ? (control.get(part) as number) : part)).filter((part) => part !== "");
  }
}

const inForm = (text: string, isInParts: boolean): Content => (isInParts ? [{ type: "text", text }] : text);

const controlOf = (parts: readonly (string | number)[]): string => parts.filter((part) => typeof part === "number").join();
