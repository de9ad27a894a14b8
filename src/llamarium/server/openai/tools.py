"""Fields about tools: the tools, and which of them may or must be called."""

from typing import Any, Literal

from pydantic import Field

from llamarium.errors import ToolError
from llamarium.server.errors import of_library
from llamarium.server.fields import Body
from llamarium.server.hints import with_hints
from llamarium.tokenizer.tools.request import ToolRequest

_NO_CUSTOM = {"custom": "tools are functions, with a schema of their arguments"}


@with_hints("chat tools[].function")
class Function(Body):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


@with_hints("chat tools[]")
class Tool(Body):
    """A tool."""

    refused = _NO_CUSTOM

    type: Literal["function"]
    function: Function


class Name(Body):
    """A function, by its name."""

    name: str


class NamedTool(Body):
    """A tool, by its name."""

    refused = _NO_CUSTOM

    type: Literal["function"]
    function: Name


class AllowedTools(Body):
    """Some of the tools, and whether one has to be called."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1)


class ChosenTools(Body):
    """One tool that has to be called, or the choice between some."""

    refused = _NO_CUSTOM

    type: Literal["function", "allowed_tools"]
    function: Name | None = None
    allowed_tools: AllowedTools | None = None


ToolChoice = Literal["auto", "none", "required"] | ChosenTools


def tool_request(tools: list[Tool] | None, choice: ToolChoice | None, parallel: bool | None) -> ToolRequest:
    """Read a request's fields about tools."""
    listed = None if tools is None else [tool.model_dump(include={"type", "function"}) for tool in tools]
    chosen = choice if choice is None or isinstance(choice, str) else choice.model_dump(exclude_none=True)
    try:
        return ToolRequest.read(listed, chosen, parallel)
    except ToolError as error:
        raise of_library(error) from None
