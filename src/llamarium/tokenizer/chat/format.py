"""The protocol of dialog formats, and what they need of a tokenizer."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, Protocol, Self, TypeVar

from llamarium.errors import LlamariumError
from llamarium.tokenizer.chat.templates import ChatTemplates
from llamarium.tokenizer.special import Parts, SpecialTokens
from llamarium.tokenizer.tools.definition import ToolDefinition
from llamarium.tokenizer.tools.forms import ToolForm

T = TypeVar("T")
P = ParamSpec("P")

Part = tuple[list[int], bool]
"""Ids of one part of a dialog, and whether they are an answer (with the token that ends it)."""


Written = tuple[Parts, bool]
"""One part of a dialog as texts and control tokens, and whether it is an answer (with the token that ends it)."""


class Vocabulary(Protocol):
    """What a format needs of a tokenizer; `Tokenizer` is one."""

    source: str
    special: SpecialTokens
    chat_templates: ChatTemplates

    def with_chat_template(self, template: str) -> Self:
        """Return a tokenizer of the same vocabulary with another template."""
        ...

    def encode_parts(self, parts: Parts) -> list[int]:
        """Encode texts and control tokens that are one string."""
        ...

    def split_special(self, text: str) -> list[str]:
        """Split into text, control token, text, ..."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token."""
        ...


class TrainingDialog(NamedTuple):
    """A dialog that is learned from; tools and variables as `ChatFormat.encode` takes them."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[ToolDefinition] = ()
    variables: Mapping[str, Any] | None = None


class ChatFormat(Protocol):
    """How a dialog becomes ids."""

    @property
    def name(self) -> str:
        """The format's name, for `info`."""
        ...

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids that end an answer."""
        ...

    @property
    def tool_form(self) -> ToolForm | None:
        """The default form of calls, or None if it is not known."""

    @property
    def variables(self) -> frozenset[str]:
        """The variables that it reads, besides those of every dialog."""
        ...

    @property
    def marks_answers(self) -> bool:
        """Whether a template marks what is learned: then an answer may have several pieces in `parts_of`, or none."""
        ...

    @property
    def message_keys(self) -> frozenset[str]:
        """The keys of messages that it reads, and maybe others."""
        ...

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[ToolDefinition] = (),
        tool_form: ToolForm | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the ids of a dialog; `ChatFormatError` or `ToolError` if it does not fit the format.

        Args:
            messages: Each with `role` and `content`; an assistant's may have `tool_calls`, and then no content, and a
                tool's `tool_call_id`.
            add_generation_prompt: End with the header of the assistant's next message.
            tools: What the model may call.
            tool_form: How tools, calls and results are written; None is the format's own way.
            variables: Of the template, besides those of every dialog; each of them one that it reads.
        """
        ...

    def parts_of(self, dialogs: Sequence[TrainingDialog]) -> Iterator[list[Part] | LlamariumError]:
        """Yield the ids of each dialog in pieces, so that the assistant's can be learned: one piece for each answer.

        A dialog that is refused has its error in its place, as `encode` raises it, or `ChatFormatError` if the format
        cannot tell the pieces apart. Of tools that the format has no place for, the messages have texts.
        An answer is encoded as a model writes it: by itself, after its header. Many dialogs at once take few processes
        of a template.
        """
        ...

    def prompts_of(self, dialogs: Sequence[TrainingDialog]) -> Iterator[list[int] | LlamariumError]:
        """Yield the ids of each dialog up to the header of an answer, for training, or the error that refuses it.

        As for `parts_of`, many dialogs at once take few processes, and the day is always the same.
        """
        ...


def value_or_error(make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | LlamariumError:
    """Return what a function makes, or the error that it raises."""
    try:
        return make(*args, **kwargs)
    except LlamariumError as error:
        return error


def value_of(made: T | LlamariumError) -> T:
    """Return what has been made, or raise the error that stands in its place."""
    if isinstance(made, LlamariumError):
        raise made
    return made


def encode_written(tokenizer: Vocabulary, written: Sequence[Written]) -> list[Part]:
    """Encode the parts of a dialog, each as what follows the parts before it.

    Two neighbouring texts may share a token in the encoding of the whole dialog. A model that is asked finds the first
    text alone, so the second is encoded by itself there.
    """
    parts: list[Part] = []
    before: list[str | int] = []  # since the last control token, which is as far as any rule looks
    for new, is_answer in written:
        begun = tokenizer.encode_parts(before)
        ids = tokenizer.encode_parts([*before, *new])
        parts.append((ids[len(begun) :] if ids[: len(begun)] == begun else tokenizer.encode_parts(new), is_answer))
        before += new
        last = max((i for i, part in enumerate(before) if not isinstance(part, str)), default=0)
        del before[:last]
    return parts
