"""From a dialog, as each protocol has it, to ids; and from what is wrong with it back to the client's field."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from llamarium.errors import ToolError, escape
from llamarium.server.errors import ApiError, of_library
from llamarium.tokenizer.base import Tokenizer
from llamarium.tokenizer.tools.definition import ToolDefinition
from llamarium.tokenizer.tools.forms import ToolForm
from llamarium.tokenizer.tools.request import ToolRequest


class Dialog:
    """A dialog as OpenAI's chat completions have it, made of what another protocol's client has sent.

    Args:
        names: What the client calls the beginning of a path that OpenAI calls so: patterns, of which the first that
            fits is used, and what stands in their place. What lies below, in a client's schema, is never touched.

    Attributes:
        messages: As `ChatFormat.encode` takes them.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self.messages: list[dict[str, Any]] = []
        self._names = names
        self._places: dict[str, str] = {}

    def add(self, where: str, message: dict[str, Any]) -> None:
        """Take a message.

        Args:
            where: Its path in the request.
            message: With `role` and `content`.
        """
        self._places[f"messages[{len(self.messages)}]"] = where
        self.messages.append(message)

    def add_call(self, where: str, call_id: str, name: str, arguments: str) -> None:
        """Take a call that the assistant has made in the last message."""
        calls: list[dict[str, Any]] = self.messages[-1].setdefault("tool_calls", [])
        self._places[f"messages[{len(self.messages) - 1}].tool_calls[{len(calls)}]"] = where
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})

    def path_of(self, path: str) -> str:
        """Return what the client calls a field that OpenAI's chat completions call so."""
        found = re.match(r"messages\[\d+\](\.tool_calls\[\d+\])?", path)
        if found is not None and found[0] in self._places:
            path = self._places[found[0]] + path[found.end() :]
        for ours, theirs in self._names.items():
            renamed, fits = re.subn(rf"^{ours}", theirs, path)
            if fits:
                return renamed
        return path

    def tools(self, tools: object, choice: object, parallel: object) -> ToolRequest:
        """Return what a request says about tools, which are given as OpenAI's chat completions have them.

        Raises:
            ApiError: By the client's field.
        """
        try:
            return ToolRequest.read(tools, choice, parallel)
        except ToolError as error:
            raise renamed(of_library(error), self.path_of) from None


def renamed(refusal: ApiError, path_of: Callable[[str], str]) -> ApiError:
    """Name the field that is at fault as the client calls it; a message shows the beginning of a long path alone."""
    if (name := refusal.param) is not None:
        refusal.param = path_of(name)
        refusal.message = refusal.message.replace(escape(name), escape(refusal.param), 1)
    return refusal


def encode_dialog(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    most: int,
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[ToolDefinition] = (),
    tool_form: ToolForm | None = None,
) -> list[int]:
    """Return the ids of a dialog.

    Args:
        tokenizer: The model's.
        messages: The dialog, as `ChatFormat.encode` takes it.
        most: Tokens that fit; a text that is far longer is not encoded.
        add_generation_prompt: End with the header of an answer.
        tools: What the model may call.
        tool_form: How it is told of them.

    Raises:
        LlamariumError: If it is too long, or does not fit the model's format.
    """
    tokenizer.check_length("".join(_texts(messages)), most)
    return tokenizer.chat(messages, add_generation_prompt=add_generation_prompt, tools=tools, tool_form=tool_form)


def _texts(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield what is said in a dialog, and the arguments of calls."""
    for message in messages:
        yield message["content"] or ""
        for call in message.get("tool_calls", ()):
            yield call["function"]["arguments"]


def misplaced(param: str, reason: str) -> ApiError:
    """Return the refusal of a part of a dialog that stands where it cannot."""
    return ApiError(400, f"{param} {reason}", code="invalid_parameter", param=param)


def missing(param: str) -> ApiError:
    """Return the refusal of a request without a field that it needs."""
    return ApiError(400, f"{param} is missing", code="missing_parameter", param=param)
