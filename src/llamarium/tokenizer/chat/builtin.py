"""The dialog formats that are built in: Llama 3's and ChatML."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from llamarium.tokenizer.chat.format import Part, Vocabulary
from llamarium.tokenizer.chat.turns import read_turns
from llamarium.tokenizer.tools.definition import ToolDefinition
from llamarium.tokenizer.tools.forms import PYTHON_TAG, ToolForm, Turn

LLAMA3_TOKENS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")


class Llama3Format:
    r"""Llama 3's dialogs: `<|start_header_id|>role<|end_header_id|>\n\ncontent<|eot_id|>`, BOS once at the front.

    White space around a content is stripped, and a tool's message has the role `ipython`. Calls in Llama 3.1's JSON
    are announced by `<|python_tag|>` and ended by `<|eom_id|>`, in vocabularies that have them.

    Source: meta-llama/llama3, `llama/tokenizer.py`, `ChatFormat`; llama-models, `llama3/chat_format.py`.
    """

    name = "llama3"
    tool_form: ToolForm = "llama3_json"

    def __init__(self, tokenizer: Vocabulary) -> None:
        """Take a tokenizer that has Llama 3's control tokens."""
        special = tokenizer.special_tokens
        self._tokenizer = tokenizer
        self._special = special
        self._start, self._end, self._turn_end = (special[name] for name in LLAMA3_TOKENS)
        self.stop_ids = tuple(
            special[name] for name in ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>") if name in special
        )

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[ToolDefinition] = (),
        tool_form: ToolForm | None = None,
    ) -> list[int]:
        """Return the ids of a dialog; see `ChatFormat.encode`."""
        form = tool_form or self.tool_form
        ids = [i for part, _ in self._parts(read_turns(messages, tools, form), form) for i in part]
        return ids + self._header("assistant") if add_generation_prompt else ids

    def parts(self, messages: Sequence[Mapping[str, Any]]) -> list[Part]:
        """Return the ids of a dialog in pieces; see `ChatFormat.parts`."""
        return self._parts(read_turns(messages, (), self.tool_form), self.tool_form)

    def _parts(self, turns: Sequence[Turn], form: ToolForm) -> list[Part]:
        bos = self._tokenizer.bos_token_id
        parts: list[Part] = [([] if bos is None else [bos], False)]
        for turn in turns:
            parts.append((self._header("ipython" if turn.role == "tool" else turn.role), False))
            parts.append((self._body(turn, form), turn.role == "assistant"))
        return parts

    def _body(self, turn: Turn, form: ToolForm) -> list[int]:
        """Return the ids of what one says, with the token that ends it."""
        encode = partial(self._tokenizer.encode, add_special_tokens=False)
        content, is_json = turn.content.strip(), form == "llama3_json"
        if not turn.calls or PYTHON_TAG not in self._special or not (is_json or content):
            return [*encode(turn.text.strip()), self._turn_end]
        end = self._special.get("<|eom_id|>", self._turn_end) if is_json else self._turn_end
        return [*encode(content), self._special[PYTHON_TAG], *encode(turn.calls), end]

    def parts_of(self, dialogs: Sequence[Sequence[Mapping[str, Any]]]) -> Iterator[list[Part]]:
        """Yield the pieces of each dialog; see `ChatFormat.parts_of`."""
        return map(self.parts, dialogs)

    def _header(self, role: str) -> list[int]:
        encode = partial(self._tokenizer.encode, add_special_tokens=False)
        return [self._start, *encode(role), self._end, *encode("\n\n")]


class ChatMLFormat:
    r"""ChatML: `<|im_start|>role\ncontent<|im_end|>\n`, the content as it is. Tools are in Hermes' form.

    Source: openai/openai-python at v0.27, `chatml.md`; SmolLM2's chat template for `default_system`.
    """

    name = "chatml"
    tool_form: ToolForm = "hermes"

    def __init__(self, tokenizer: Vocabulary, *, default_system: str | None = None) -> None:
        """Take a tokenizer that has ChatML's control tokens.

        Args:
            tokenizer: The tokenizer.
            default_system: What the system says in a dialog that does not begin with a system message.
        """
        special = tokenizer.special_tokens
        self._tokenizer = tokenizer
        self._start, self._end = (special[name] for name in CHATML_TOKENS)
        self._default_system = default_system
        self.stop_ids = (self._end,)

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[ToolDefinition] = (),
        tool_form: ToolForm | None = None,
    ) -> list[int]:
        """Return the ids of a dialog; see `ChatFormat.encode`."""
        encode = partial(self._tokenizer.encode, add_special_tokens=False)
        ids: list[int] = []
        for role, content in self._turns(messages, tools, tool_form or self.tool_form):
            ids += [self._start, *encode(f"{role}\n{content}"), self._end, *encode("\n")]
        return [*ids, self._start, *encode("assistant\n")] if add_generation_prompt else ids

    def parts(self, messages: Sequence[Mapping[str, Any]]) -> list[Part]:
        """Return the ids of a dialog in pieces; see `ChatFormat.parts`.

        They are those of `encode` but for an answer that begins with a line end, which `encode` joins with its
        header's, as templates do. A model that is asked finds the header's alone.
        """
        encode = partial(self._tokenizer.encode, add_special_tokens=False)
        parts: list[Part] = []
        for role, content in self._turns(messages, (), self.tool_form):
            if role == "assistant":
                parts.append(([self._start, *encode("assistant\n")], False))
                parts.append(([*encode(content), self._end], True))
            else:
                parts.append(([self._start, *encode(f"{role}\n{content}"), self._end], False))
            parts.append((encode("\n"), False))
        return parts

    def parts_of(self, dialogs: Sequence[Sequence[Mapping[str, Any]]]) -> Iterator[list[Part]]:
        """Yield the pieces of each dialog; see `ChatFormat.parts_of`."""
        return map(self.parts, dialogs)

    def _turns(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[ToolDefinition], form: ToolForm
    ) -> list[tuple[str, str]]:
        turns = read_turns(messages, tools, form)
        if self._default_system is not None and turns[0].role != "system":
            turns.insert(0, Turn("system", self._default_system))
        return [(turn.role, turn.text) for turn in turns]
