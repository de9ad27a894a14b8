"""Dialogs: messages, and the tools that a model may call. Torch-free."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llamarium.generation.text_model import TextModel
from llamarium.options.declare import option, with_default
from llamarium.options.serving import ServingOptions
from llamarium.sampling.grammar.calls import grammar_of_answer
from llamarium.sampling.grammar.description import OPTIONS as GRAMMAR_OPTIONS
from llamarium.sampling.grammar.description import Grammar, warn_unenforced
from llamarium.sampling.keywords import SamplingKeywords
from llamarium.tokenizer.base import Tokenizer
from llamarium.tokenizer.tools.definition import ToolDefinition
from llamarium.tokenizer.tools.forms import ToolForm, check_form
from llamarium.tokenizer.tools.functions import described
from llamarium.tokenizer.tools.request import ToolRequest

CHAT_MAX_TOKENS = 1024
"""Tokens of an answer in a dialog, by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DialogOptions:
    """Options of a dialog besides its messages."""

    tools: Sequence[Mapping[str, Any] | Callable[..., Any] | ToolDefinition] | None = option(
        None, "tools the model may call: objects as in OpenAI's API, Python functions, or `ToolDefinition`"
    )
    tool_choice: str | Mapping[str, Any] | None = option(
        None, "auto (the model decides), none, required, or an object that names the tools the model must or may call"
    )
    parallel_tool_calls: bool | None = option(None, "allow several calls in one answer (default: allowed)")
    tool_form: ToolForm | None = with_default(ServingOptions, "tool_form", None)
    documents: Sequence[Mapping[str, Any]] | None = option(
        None, "documents for the chat template, if it reads them: objects with title and text, or the template's fields"
    )


def read_dialog(
    model: TextModel, messages: Sequence[Mapping[str, Any]], dialog_options: DialogOptions, options: SamplingKeywords
) -> tuple[list[int], ToolRequest]:
    """Return a dialog's token ids and its tools, and store the answer's grammar, if any, in `options`.

    Raises:
        ToolError: If tools are invalid; it names the field's path.
        ChatFormatError: If the dialog does not fit the model's chat format.
        GrammarError: If the grammar cannot be enforced, or not together with tools.
    """
    request = ToolRequest.read(
        described(dialog_options.tools), dialog_options.tool_choice, dialog_options.parallel_tool_calls
    )
    check_form(form := dialog_options.tool_form)
    ids = model.tokenizer.chat(messages, tools=request.offered, tool_form=form, documents=dialog_options.documents)
    answer = Grammar.from_options(options)
    request = request if answer is None else request.after(messages)
    for name in GRAMMAR_OPTIONS:
        options.pop(name, None)
    grammar = grammar_of_answer(request, form or own_tool_form(model.tokenizer), answer)
    if grammar is not answer:
        warn_unenforced(grammar)
    options["grammar"] = grammar
    return ids, request


def own_tool_form(tokenizer: Tokenizer) -> ToolForm | None:
    """Return the tool call format of the model's chat format, or None if it is unknown."""
    return None if tokenizer.chat_format is None else tokenizer.chat_format.tool_form
