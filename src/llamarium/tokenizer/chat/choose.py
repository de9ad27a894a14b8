"""Choose a tokenizer's chat format: by its chat template, else by its control tokens."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import repeat
from pathlib import Path
from typing import Any, TypeVar

from llamarium.errors import ChatFormatError, LlamariumError, escape, show_value
from llamarium.tokenizer.chat.builtin import ChatMLFormat, Llama3Format
from llamarium.tokenizer.chat.format import ChatFormat, Part, TrainingDialog, Vocabulary, value_or_error
from llamarium.tokenizer.chat.named import (
    CHATML_TOKENS,
    KNOWN_TEMPLATES,
    LLAMA3_TOKENS,
    NAMED_FORMATS,
    SMOLLM2_SYSTEM,
)
from llamarium.tokenizer.tools.definition import ToolDefinition
from llamarium.tokenizer.tools.forms import ToolForm

MAX_TEMPLATE_BYTES = 2**20  # of a template file; templates have at most 2**18 characters

T = TypeVar("T")
VocabularyT = TypeVar("VocabularyT", bound=Vocabulary)


def choose_format(tokenizer: Vocabulary) -> ChatFormat | None:
    """Return a tokenizer's chat format, or None if it has none.

    A known template selects its built-in format; any other template runs in the sandbox. Without a template, the
    vocabulary's control tokens decide.
    """
    templates = tokenizer.chat_templates
    if not templates.by_name:
        return _by_tokens(tokenizer)
    if templates.with_tools == templates.default and templates.default is not None:
        return _of_template(tokenizer, templates.default)
    return _ByTools(tokenizer)


def _by_tokens(tokenizer: Vocabulary) -> ChatFormat | None:
    special = tokenizer.special.ids
    if all(name in special for name in LLAMA3_TOKENS):
        return Llama3Format(tokenizer)
    return ChatMLFormat(tokenizer) if all(name in special for name in CHATML_TOKENS) else None


def _of_template(tokenizer: Vocabulary, template: str) -> ChatFormat:
    special = tokenizer.special.ids
    chat_format = KNOWN_TEMPLATES.get(template.replace("\\n", "\n").strip())
    if chat_format == "llama3" and all(name in special for name in LLAMA3_TOKENS):
        return Llama3Format(tokenizer)
    if chat_format in ("chatml", "smollm2") and all(name in special for name in CHATML_TOKENS):
        return ChatMLFormat(tokenizer, default_system=SMOLLM2_SYSTEM if chat_format == "smollm2" else None)

    from llamarium.tokenizer.chat.template import TemplateFormat

    return TemplateFormat(tokenizer, template)


class _ByTools:
    """The format of a model with separate templates for dialogs with and without tools."""

    name = "template"

    def __init__(self, tokenizer: Vocabulary) -> None:
        self._source = tokenizer.source
        self._names = list(tokenizer.chat_templates.by_name)
        texts = tokenizer.chat_templates.default, tokenizer.chat_templates.with_tools
        self._default, self._with_tools = (None if text is None else _of_template(tokenizer, text) for text in texts)

    @cached_property
    def _formats(self) -> list[ChatFormat]:
        return [one for one in (self._default, self._with_tools) if one is not None]

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(i for one in self._formats for i in one.stop_ids))

    @property
    def tool_form(self) -> ToolForm | None:
        return None if self._with_tools is None else self._with_tools.tool_form

    @property
    def variables(self) -> frozenset[str]:
        return frozenset[str]().union(*(one.variables for one in self._formats))

    @property
    def marks_answers(self) -> bool:
        return any(one.marks_answers for one in self._formats)

    @property
    def message_keys(self) -> frozenset[str]:
        return frozenset[str]().union(*(one.message_keys for one in self._formats))

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[ToolDefinition] = (),
        tool_form: ToolForm | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the ids of a dialog; with a `tool_form`, tools are part of the messages, so the default is used."""
        chosen = self._chosen(has_tools=bool(tools) and tool_form is None)
        options: Any = {"tools": tools, "tool_form": tool_form, "variables": variables}
        return chosen.encode(messages, add_generation_prompt=add_generation_prompt, **options)

    def parts_of(self, dialogs: Sequence[TrainingDialog]) -> Iterator[list[Part] | LlamariumError]:
        return self._each(dialogs, lambda form, chosen: form.parts_of(chosen))

    def prompts_of(self, dialogs: Sequence[TrainingDialog]) -> Iterator[list[int] | LlamariumError]:
        return self._each(dialogs, lambda form, chosen: form.prompts_of(chosen))

    def _each(
        self,
        dialogs: Sequence[TrainingDialog],
        make: Callable[[ChatFormat, Sequence[TrainingDialog]], Iterator[T | LlamariumError]],
    ) -> Iterator[T | LlamariumError]:
        """Yield the result of `make` for each dialog, which is called once per template with all of its dialogs.

        If a template is missing, its dialogs yield the error.
        """
        results: dict[bool, Iterator[T | LlamariumError]] = {}
        for has_tools in {bool(dialog.tools) for dialog in dialogs}:
            form = value_or_error(self._chosen, has_tools=has_tools)
            chosen = [dialog for dialog in dialogs if bool(dialog.tools) == has_tools]
            results[has_tools] = repeat(form) if isinstance(form, LlamariumError) else make(form, chosen)
        return (next(results[bool(dialog.tools)]) for dialog in dialogs)

    def _chosen(self, *, has_tools: bool) -> ChatFormat:
        chosen = self._with_tools if has_tools else self._default
        if chosen is None:
            use = "with tools" if has_tools else "without tools"
            raise ChatFormatError(
                f"{self._source}: none of the chat templates is for dialogs {use}; choose one by name: "
                f"{escape(', '.join(self._names))}"
            )
        return chosen


def with_format(tokenizer: VocabularyT, name: str) -> VocabularyT:
    """Return a tokenizer with a chat format, which its saved files record; see `with_template`.

    "auto" selects the tokenizer's own format; see `choose_format`.
    """
    if name == "auto":
        own_format = None if tokenizer.chat_templates.by_name else choose_format(tokenizer)
        if own_format is None:
            return tokenizer
        name = own_format.name
    return with_template(tokenizer, name)


def with_template(tokenizer: VocabularyT, choice: str | Path) -> VocabularyT:
    """Return a tokenizer with the same vocabulary and another chat template.

    Args:
        tokenizer: The tokenizer.
        choice: The name of one of its own templates (`rag`), the name of a format (`NAMED_FORMATS`), a file, or the
            text of a template, which is recognized by its braces.

    Raises:
        ChatFormatError: If the choice does not exist, or the vocabulary lacks tokens of the format.
    """
    text = str(choice)
    own_templates = tokenizer.chat_templates.by_name
    if text in own_templates:
        return tokenizer.with_chat_template(own_templates[text])
    if text in NAMED_FORMATS:
        return tokenizer.with_chat_template(_named(tokenizer, text))
    if "{{" in text or "{%" in text:
        return tokenizer.with_chat_template(text)
    return tokenizer.with_chat_template(_read_file(Path(choice), [*own_templates, *NAMED_FORMATS]))


def _named(tokenizer: Vocabulary, name: str) -> str:
    template, needed = NAMED_FORMATS[name]
    if missing := [token for token in needed if token not in tokenizer.special.ids]:
        raise ChatFormatError(f"{tokenizer.source}: has no {', '.join(missing)}, which the chat format {name} needs")
    if not needed and not tokenizer.special.eos:
        raise ChatFormatError(f"{tokenizer.source}: has no EOS token, which the chat format {name} needs")
    return template


def _read_file(path: Path, names: Sequence[str]) -> str:
    try:
        if not path.is_file():
            raise ChatFormatError(
                f"the chat template is {show_value(str(path))}, which is neither a file nor one of "
                f"{escape(', '.join(dict.fromkeys(names)))}"
            )
        if (size := path.stat().st_size) > MAX_TEMPLATE_BYTES:
            raise ChatFormatError(f"{escape(path)}: {size:,} bytes; a chat template has at most {MAX_TEMPLATE_BYTES:,}")
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ChatFormatError(f"{escape(path)}: cannot be read as a chat template: {escape(error)}") from None
