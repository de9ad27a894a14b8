"""Dialogs: messages, and the tools that a model may call. Torch-free."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, cast

from llamarium.generation.options import AnswerOptions, StreamOptions
from llamarium.generation.text_model import TextModel
from llamarium.sampling.grammar.calls import grammar_of_answer
from llamarium.sampling.grammar.description import OPTIONS as GRAMMAR_OPTIONS
from llamarium.sampling.grammar.description import Grammar, warn_unenforced
from llamarium.sampling.params import GenerationOptions
from llamarium.tokenizer.base import Tokenizer
from llamarium.tokenizer.tools.definition import ToolDefinition
from llamarium.tokenizer.tools.forms import ToolForm, check_form
from llamarium.tokenizer.tools.functions import described
from llamarium.tokenizer.tools.request import ToolRequest

CHAT_MAX_TOKENS = 1024
"""Tokens of an answer in a dialog, by default."""


class DialogOptions(TypedDict, total=False):
    """What a dialog has besides messages: tools, as OpenAI's API has them, and documents.

    Attributes:
        tools: What the model may call: objects as OpenAI's API has them, functions of Python, or `ToolDefinition`.
        tool_choice: "auto" leaves it to the model, "none" hides the tools from it, "required" has it call one; an
            object names one that it has to call, or those that it may.
        parallel_tool_calls: There may be several calls in one answer, which is the default.
        tool_form: How tools and calls are written; None is its dialog format's own way.
        documents: Texts that the answer may draw on, if the model's chat template reads them: objects with `title` and
            `text`, or whatever fields the template writes.
    """

    tools: Sequence[Mapping[str, Any] | Callable[..., Any] | ToolDefinition] | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool | None
    tool_form: ToolForm | None
    documents: Sequence[Mapping[str, Any]] | None


class ChatOptions(AnswerOptions, DialogOptions, total=False):
    """The options of an answer in a dialog."""


class StreamChatOptions(StreamOptions, DialogOptions, total=False):
    """The options of `TextEngine.stream_chat`."""


def read_dialog(
    model: TextModel, messages: Sequence[Mapping[str, Any]], dialog_options: DialogOptions, options: GenerationOptions
) -> tuple[list[int], ToolRequest]:
    """Return a dialog's token ids and its tools, and store the answer's grammar, if any, in `options`.

    Raises:
        ToolError: If tools are invalid; it names the field's path.
        ChatFormatError: If the dialog does not fit the model's chat format.
        GrammarError: If the grammar cannot be enforced, or not together with tools.
    """
    request = ToolRequest.read(
        described(dialog_options.get("tools")),
        dialog_options.get("tool_choice"),
        dialog_options.get("parallel_tool_calls"),
    )
    check_form(form := dialog_options.get("tool_form"))
    ids = model.tokenizer.chat(
        messages, tools=request.offered, tool_form=form, documents=dialog_options.get("documents")
    )
    answer = Grammar.from_options(options)
    request = request if answer is None else request.after(messages)
    for name in GRAMMAR_OPTIONS:
        options.pop(name, None)
    grammar = grammar_of_answer(request, form or own_tool_form(model.tokenizer), answer)
    if grammar is not answer:
        warn_unenforced(grammar)
    options["grammar"] = grammar
    return ids, request


def split_dialog_options(options: DialogOptions) -> DialogOptions:
    """Remove the dialog options from `options` and return them."""
    return cast(DialogOptions, {name: options.pop(name) for name in DialogOptions.__annotations__ if name in options})


def own_tool_form(tokenizer: Tokenizer) -> ToolForm | None:
    """Return the tool call format of the model's chat format, or None if it is unknown."""
    return None if tokenizer.chat_format is None else tokenizer.chat_format.tool_form
