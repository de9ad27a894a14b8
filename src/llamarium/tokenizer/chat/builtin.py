"""The built-in chat formats: Llama 3 and ChatML."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llamarium.errors import ChatFormatError, LlamariumError, show_value
from llamarium.tokenizer.chat.format import Part, TrainingDialog, Vocabulary, Written, encode_written, value_or_error
from llamarium.tokenizer.chat.named import CHATML_TOKENS, LLAMA3_TOKENS
from llamarium.tokenizer.chat.turns import read_turns
from llamarium.tokenizer.tools.definition import ToolDefinition
from llamarium.tokenizer.tools.forms import PYTHON_TAG, ToolForm, Turn, check_form


class _BuiltIn(ABC):
    name: str
    tool_form: ToolForm
    variables = frozenset[str]()
    marks_answers = False
    message_keys = frozenset(("role", "content", "tool_calls", "tool_call_id"))

    def __init__(self, tokenizer: Vocabulary) -> None:
        self._tokenizer = tokenizer
        self._special = tokenizer.special.ids

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[ToolDefinition] = (),
        tool_form: ToolForm | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        if variables:
            raise ChatFormatError(f"the chat format {self.name} has no variables; leave out {show_value([*variables])}")
        if tool_form is not None:
            check_form(tool_form)
        form = tool_form or self.tool_form
        written = [part for parts, _ in self._write(read_turns(messages, tools, form), form) for part in parts]
        return self._tokenizer.encode_parts(
            [*written, *self._header("assistant")] if add_generation_prompt else written
        )

    def parts_of(self, dialogs: Sequence[TrainingDialog]) -> Iterator[list[Part] | LlamariumError]:
        def encoded(dialog: TrainingDialog) -> list[Part]:
            turns = read_turns(dialog.messages, dialog.tools, self.tool_form)
            return encode_written(self._tokenizer, self._write(turns, self.tool_form))

        return (value_or_error(encoded, dialog) for dialog in dialogs)

    def prompts_of(self, dialogs: Sequence[TrainingDialog]) -> Iterator[list[int] | LlamariumError]:
        return (value_or_error(self.encode, dialog.messages, tools=dialog.tools) for dialog in dialogs)

    @abstractmethod
    def _header(self, role: str) -> list[str | int]:
        """Return the header of a message."""

    @abstractmethod
    def _write(self, turns: list[Turn], form: ToolForm) -> list[Written]:
        """Return the parts of a dialog."""


class Llama3Format(_BuiltIn):
    r"""Llama 3: `<|start_header_id|>role<|end_header_id|>\n\ncontent<|eot_id|>`, after one BOS.

    White space around the content is stripped, and tool messages have the role `ipython`. Llama 3.1's JSON calls start
    with `<|python_tag|>` and end with `<|eom_id|>`, if the vocabulary has them.

    Source: meta-llama/llama3, `llama/tokenizer.py`, `ChatFormat`; llama-models, `llama3/chat_format.py`.
    """

    name = "llama3"
    tool_form: ToolForm = "llama3_json"

    def __init__(self, tokenizer: Vocabulary) -> None:
        super().__init__(tokenizer)
        special = self._special
        self._start, self._end, self._turn_end = (special[name] for name in LLAMA3_TOKENS)
        self.stop_ids = tuple(
            special[name] for name in ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>") if name in special
        )

    def _write(self, turns: list[Turn], form: ToolForm) -> list[Written]:
        bos = self._tokenizer.special.bos
        written: list[Written] = [([] if bos is None else [bos], False)]
        for turn in turns:
            written.append((self._header("ipython" if turn.role == "tool" else turn.role), False))
            written.append((self._body(turn, form), turn.role == "assistant"))
        return written

    def _body(self, turn: Turn, form: ToolForm) -> list[str | int]:
        """Return a turn's text with the token that ends it."""
        content, is_json = turn.content.strip(), form == "llama3_json"
        if not turn.calls:
            return [content, self._turn_end]
        if PYTHON_TAG not in self._special or not (is_json or content):
            return [turn.text.strip(), self._turn_end]
        end = self._special.get("<|eom_id|>", self._turn_end) if is_json else self._turn_end
        return [content, self._special[PYTHON_TAG], turn.calls, end]

    def _header(self, role: str) -> list[str | int]:
        return [self._start, role, self._end, "\n\n"]


class ChatMLFormat(_BuiltIn):
    r"""ChatML: `<|im_start|>role\ncontent<|im_end|>\n`, with the content unchanged and tools in the Hermes format.

    Source: openai/openai-python at v0.27, `chatml.md`; SmolLM2's chat template for `default_system`.
    """

    name = "chatml"
    tool_form: ToolForm = "hermes"

    def __init__(self, tokenizer: Vocabulary, *, default_system: str | None = None) -> None:
        """Use a tokenizer with ChatML's control tokens; `default_system` is the default system message."""
        super().__init__(tokenizer)
        self._start, self._end = (self._special[name] for name in CHATML_TOKENS)
        self._default_system = default_system
        self.stop_ids = (self._end,)

    def _write(self, turns: list[Turn], form: ToolForm) -> list[Written]:
        written: list[Written] = []
        if self._default_system is not None and turns[0].role != "system":
            turns = [Turn("system", self._default_system), *turns]
        for turn in turns:
            header, body = self._header(turn.role), [turn.text if turn.calls else turn.content, self._end]
            if turn.role == "assistant":
                written += [(header, False), (body, True)]
            else:
                written.append(([*header, *body], False))
            written.append((["\n"], False))
        return written

    def _header(self, role: str) -> list[str | int]:
        return [self._start, f"{role}\n"]
