"""The `ChatFormat` protocol, and what chat formats need of a tokenizer."""

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
"""The ids of a part of a dialog, and whether it is an answer (including the token that ends it)."""


Written = tuple[Parts, bool]
"""A part of a dialog as texts and control tokens, and whether it is an answer (including the token that ends it)."""


class Vocabulary(Protocol):
    """The part of `Tokenizer` that chat formats need."""

    source: str
    special: SpecialTokens
    chat_templates: ChatTemplates

    def with_chat_template(self, template: str) -> Self:
        """Return a tokenizer with the same vocabulary and another template."""
        ...

    def encode_parts(self, parts: Parts) -> list[int]:
        """Encode texts and control tokens as one string."""
        ...

    def split_special(self, text: str) -> list[str]:
        """Split into text, control token, text, ..."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token."""
        ...


class TrainingDialog(NamedTuple):
    """A dialog for training; tools and variables as in `ChatFormat.encode`."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[ToolDefinition] = ()
    variables: Mapping[str, Any] | None = None


class ChatFormat(Protocol):
    """Turns dialogs into token ids."""

    @property
    def name(self) -> str:
        """Display name."""
        ...

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids that end an answer."""
        ...

    @property
    def tool_form(self) -> ToolForm | None:
        """The format of tool calls, or None if it is unknown."""

    @property
    def variables(self) -> frozenset[str]:
        """The template variables that it reads in addition to the standard ones."""
        ...

    @property
    def marks_answers(self) -> bool:
        """Whether a template marks what is learned; then an answer may have several parts in `parts_of`, or none."""
        ...

    @property
    def message_keys(self) -> frozenset[str]:
        """A superset of the message keys that it reads."""
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
        """Return the ids of a dialog.

        Args:
            messages: Messages with `role` and `content`. An assistant's may have `tool_calls`, and then no content; a
                tool's may have `tool_call_id`.
            add_generation_prompt: Whether to end with the header of the assistant's next message.
            tools: The tools that the model may call.
            tool_form: Format of tools, calls and results; None for the chat format's own.
            variables: Additional variables of the template, which it must read.

        Raises:
            ChatFormatError or ToolError: If the dialog does not fit the format.
        """
        ...

    def parts_of(self, dialogs: Sequence[TrainingDialog]) -> Iterator[list[Part] | LlamariumError]:
        """Yield the ids of each dialog for training, divided into parts, with one part per answer.

        An invalid dialog yields its error: that of `encode`, or a ChatFormatError if the format cannot separate the
        parts. If the format does not support tools, they are written into the messages. An answer is encoded as a model
        generates it, separately from its header. Passing many dialogs at once saves processes of the template sandbox.
        """
        ...

    def prompts_of(self, dialogs: Sequence[TrainingDialog]) -> Iterator[list[int] | LlamariumError]:
        """Yield the ids of each dialog as a prompt for training, ending with the header of an answer, or its error.

        As with `parts_of`, many dialogs at once save processes; templates always see the same date.
        """
        ...


def value_or_error(make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | LlamariumError:
    """Return a function's result, or the LlamariumError that it raises."""
    try:
        return make(*args, **kwargs)
    except LlamariumError as error:
        return error


def value_of(made: T | LlamariumError) -> T:
    """Return a value, or raise it if it is an error."""
    if isinstance(made, LlamariumError):
        raise made
    return made


def encode_written(tokenizer: Vocabulary, written: Sequence[Written]) -> list[Part]:
    """Encode the parts of a dialog, each as a continuation of the parts before it.

    In the encoding of the whole dialog, a token may span two adjacent texts. When a model generates the second text,
    the first has been encoded without it, so then the second is encoded separately.
    """
    parts: list[Part] = []
    before: list[str | int] = []  # from the last control token on; no rule looks further back
    for new, is_answer in written:
        prefix_ids = tokenizer.encode_parts(before)
        ids = tokenizer.encode_parts([*before, *new])
        parts.append(
            (ids[len(prefix_ids) :] if ids[: len(prefix_ids)] == prefix_ids else tokenizer.encode_parts(new), is_answer)
        )
        before += new
        last = max((i for i, part in enumerate(before) if not isinstance(part, str)), default=0)
        del before[:last]
    return parts
