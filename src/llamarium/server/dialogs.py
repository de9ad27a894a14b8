"""Encodes dialogs of any protocol, and translates errors back to the client's field names."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from llamarium.errors import TokenizerError, ToolError, escape
from llamarium.server.errors import ApiError, of_library
from llamarium.server.lifecycle.service import Service
from llamarium.server.other_tools import FunctionTool, definitions_of
from llamarium.tokenizer.chat.content import joined
from llamarium.tokenizer.chat.messages import check_documents
from llamarium.tokenizer.chat.template_worker import OF_DIALOGS
from llamarium.tokenizer.tools.definition import ToolDefinition
from llamarium.tokenizer.tools.request import ToolRequest

_KEYS = ("role", "content", "tool_calls", "tool_call_id")


class Dialog:
    """A dialog in the form of OpenAI's chat completions, converted from another protocol.

    Args:
        names: Regular expressions for prefixes of OpenAI's field paths, and their replacements in the client's
            protocol. The first match is replaced; the rest of the path is unchanged.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self.messages: list[dict[str, Any]] = []
        self._names = names
        self._places: dict[str, str] = {}
        self._path_of_tool: Callable[[str], str] = str

    def add(self, where: str, message: dict[str, Any]) -> None:
        """Append a message with `role` and `content`; `where` is its path in the request."""
        self._places[f"messages[{len(self.messages)}]"] = where
        self.messages.append(message)

    def add_call(self, where: str, call_id: str, name: str, arguments: str) -> None:
        """Append a tool call to the last message, which must be the assistant's; `where` is its path in the request."""
        calls: list[dict[str, Any]] = self.messages[-1].setdefault("tool_calls", [])
        self._places[f"messages[{len(self.messages) - 1}].tool_calls[{len(calls)}]"] = where
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})

    def path_of(self, path: str) -> str:
        """Translate a field path in OpenAI's chat completions to the client's protocol."""
        match = re.match(r"messages\[\d+\](\.tool_calls\[\d+\])?", path)
        if match is not None and match[0] in self._places:
            path = self._places[match[0]] + path[match.end() :]
        path = self._path_of_tool(path)
        for ours, theirs in self._names.items():
            renamed, fits = re.subn(rf"^{ours}", theirs, path)
            if fits:
                return renamed
        return path

    def tools(
        self,
        functions: Sequence[FunctionTool] | None,
        choice: object,
        parallel: object,
        path_of_tool: Callable[[str], str] = str,
    ) -> ToolRequest:
        """Parse a request's tool fields.

        Args:
            functions: The function tools.
            choice: `tool_choice`, as in OpenAI's chat completions.
            parallel: `parallel_tool_calls`, as in OpenAI's chat completions.
            path_of_tool: Translates tool indices if some of the client's tools were left out.

        Raises:
            ApiError: If the tools are invalid, with the client's field path.
        """
        self._path_of_tool = path_of_tool
        try:
            return ToolRequest.read(definitions_of(functions), choice, parallel)
        except ToolError as error:
            raise renamed(of_library(error), self.path_of) from None


def renamed(refusal: ApiError, path_of: Callable[[str], str]) -> ApiError:
    """Translate the field path in an error and its message; a message may contain a shortened path."""
    if (name := refusal.param) is not None:
        refusal.param = path_of(name)
        refusal.message = refusal.message.replace(escape(name), escape(refusal.param), 1)
    return refusal


def encode_dialog(
    service: Service,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[ToolDefinition] = (),
    *,
    add_generation_prompt: bool = True,
    answer_start: str | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
    effort: str | None = None,
) -> list[int]:
    """Return the token ids of a dialog.

    Args:
        service: The served model.
        messages: The dialog, as for `ChatFormat.encode`.
        tools: Tool definitions.
        add_generation_prompt: Whether the assistant's header ends the prompt.
        answer_start: Beginning of the answer, appended to the prompt.
        documents: For the chat template.
        variables: Variables for the chat template; unread ones are ignored, with `--strict-fields` refused.
        effort: The template's `reasoning_effort`, if it reads that.

    Raises:
        ApiError: If the dialog is too long or invalid, or for documents or variables that the template cannot take.
    """
    tokenizer, tool_form = service.tokenizer, service.settings.tool_form
    checked = _checked(documents) if documents else []
    tokenizer.check_length("".join((*_texts(messages), *_strings(checked))), service.max_tokens)
    form = tokenizer.chat_format
    if form is not None:  # keys that the template does not read are hints
        read = form.message_keys.union(_KEYS)
        messages = [{key: value for key, value in message.items() if key in read} for message in messages]
    read = frozenset[str]() if form is None else form.variables
    template_variables = _variables(variables, read, is_strict=service.settings.strict_fields) if variables else {}
    if checked and "documents" not in read:
        message = "documents is not supported: the model's chat template does not read it; leave it out"
        raise ApiError(400, message, code="unsupported_parameter", param="documents")
    if documents is not None and "documents" in read:
        if "documents" in template_variables:
            raise misplaced("documents", "is also set in chat_template_kwargs; set only one")
        template_variables["documents"] = checked
    if effort is not None and "reasoning_effort" in read:
        template_variables.setdefault("reasoning_effort", effort)
    template: Any = {"tools": tools, "tool_form": tool_form, "variables": template_variables}
    ids = tokenizer.chat(messages, add_generation_prompt=add_generation_prompt, **template)
    if answer_start is None:
        return ids
    tokenizer.check_length(answer_start, service.max_tokens)
    return ids + tokenizer.encode_after(ids, answer_start)


def _variables(variables: Mapping[str, Any], read: frozenset[str], *, is_strict: bool) -> dict[str, Any]:
    """Return the variables that a template reads; the others are hints (`server/hints.py`)."""
    for name in variables:
        if name in OF_DIALOGS:
            reason = "it is set by other fields of the request or by the model's files"
        elif name not in read and (is_strict or name == "documents"):
            reason = "the model's chat template does not read it"
        else:
            continue
        param = f"chat_template_kwargs.{name}"
        message = f"{escape(param)} is not supported: {reason}; leave it out"
        raise ApiError(400, message, code="unsupported_parameter", param=param)
    return {name: value for name, value in variables.items() if name in read}


def _texts(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the texts of a dialog, including tool call arguments."""
    for message in messages:
        content = message["content"]
        yield content if isinstance(content, str) else joined(content) or ""
        yield from (value for key, value in message.items() if key not in _KEYS)
        for call in message.get("tool_calls", ()):
            yield call["function"]["arguments"]


def _checked(documents: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    try:
        return check_documents(documents)
    except TokenizerError as error:
        raise ApiError(400, str(error), param="documents") from None


def _strings(value: Any) -> Iterator[str]:
    """Yield all strings in a JSON value, except keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (text for item in cast("Mapping[str, Any]", value).values() for text in _strings(item))
    elif isinstance(value, list):
        yield from (text for item in cast("list[Any]", value) for text in _strings(item))


def check_answer_start(where: str, form: str | None, tools: ToolRequest | None, *, is_alone: bool) -> None:
    """Validate a request whose last message is the beginning of the answer.

    Args:
        where: Path of the last message.
        form: Path of the field that sets the output format, or None.
        tools: The request's tools, or None.
        is_alone: Whether it is the only message.

    Raises:
        ApiError: If it is combined with tools or an output format, or is the only message.
    """
    if tools is not None and tools.offered:
        raise misplaced(where, "is the beginning of an answer, which cannot be combined with tools")
    if is_alone:
        raise misplaced("messages", "contains only the beginning of an answer; expected a message before it")
    if form is not None:
        reason = "constrains the answer, and the last message is the beginning of an answer; use only one of them"
        raise misplaced(form, reason)


def misplaced(param: str, reason: str) -> ApiError:
    """Return the error for a field that is not allowed where it is, or in this combination."""
    return ApiError(400, f"{param} {reason}", code="invalid_parameter", param=param)


def missing(param: str) -> ApiError:
    """Return the error for a missing required field."""
    return ApiError(400, f"{param} is missing", code="missing_parameter", param=param)
