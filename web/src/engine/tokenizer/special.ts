/** The control tokens of a vocabulary, as llamarium/tokenizer/special.py finds them. */

const SHAPE = /^(<\|[^|]+\|>|<｜[^｜]+｜>)$/;
const SHOWN = /^<\/?(think|thinking|reasoning|tool_call|tool_calls|tool_response|tools|function)>$/;
const THOUGHT = /^<\/?(think|thinking|reasoning)>$/;

// What ends an answer wherever a vocabulary has it as a control token. Source: llama.cpp, `llama-vocab.cpp`.
const ENDS = new Set([
  "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<|end_of_turn|>", "<end_of_turn>",
  "<end_of_utterance>", "<|EOT|>", "<EOT>", "< EOT >", "_<EOT>", "[EOT]", "[EOS]", "<|return|>", "<|call|>", "<｜end▁of▁sentence｜>",
]);

export interface TypedToken {
  spelling: string;
  id: number;
  isFlagged: boolean;
}

export interface SpecialTokens {
  /** Spelling to id. */
  ids: Map<string, number>;
  /** Those that an answer shows. */
  visible: Set<number>;
  /** What ends an answer. */
  ends: number[];
}

/** Tell whether a chat template writes a token that no word or run of blanks is. */
function isWritten(spelling: string, template: string): boolean {
  const isWord = !/\p{L}/u.test(spelling) || /^[\p{L}\p{N}\s_]*$/u.test(spelling);
  return !isWord && !THOUGHT.test(spelling) && template.includes(spelling);
}

/** `named`: BOS, EOS and padding, `eos` those of them that end a text. */
export function findSpecialTokens(typed: readonly TypedToken[], template: string | null, named: readonly number[], eos: readonly number[]): SpecialTokens {
  const ids = new Map<string, number>(), candidates = new Map<string, number>();
  for (const { spelling, id, isFlagged } of typed) (isFlagged || SHAPE.test(spelling) || ENDS.has(spelling) ? ids : candidates).set(spelling, id);
  const visible = new Set([...ids].filter(([spelling, id]) => SHOWN.test(spelling) && !named.includes(id)).map(([, id]) => id));
  for (const [spelling, id] of candidates) {
    if (template === null || !isWritten(spelling, template)) continue;
    ids.set(spelling, id);
    visible.add(id);
  }
  const isPart = (spelling: string) => spelling === "<|end|>" && ids.has("<|return|>") && ids.has("<|call|>"); // of an answer
  const known = [...ids].filter(([spelling]) => ENDS.has(spelling) && !isPart(spelling)).map(([, id]) => id);
  return { ids, visible, ends: [...new Set([...eos, ...known])] };
}

/** A text cut where spellings stand in it, the longest first: they are at the odd places. */
export function splitSpellings(text: string, spellings: Iterable<string>): string[] {
  const all = [...spellings].sort((a, b) => b.length - a.length).map((spelling) => spelling.replace(/[\\^$.*+?()[\]{}|/-]/g, "\\$&"));
  return all.length ? text.split(new RegExp(`(${all.join("|")})`)) : [text];
}
