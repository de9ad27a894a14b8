"""Tools that are not functions, e.g. those hosted by a provider: they are left out, and reported as without effect.

A request whose `tool_choice` forces such a tool is rejected; other requests keep their functions.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeVar, cast

from pydantic import Discriminator, Field

from llamarium.errors import ToolError
from llamarium.server.fields import Body, of_type
from llamarium.tokenizer.tools.definition import ToolDefinition, check_number

ToolT = TypeVar("ToolT", bound=Body)

FUNCTION, OTHER = of_type("function"), of_type("other")

_OF_FUNCTIONS = {"function", "input_schema", "inputSchema"}  # no other tool has these
_OF_UNTYPED_FUNCTIONS = {*_OF_FUNCTIONS, "parameters", "name"}  # hosted tools may have these in addition to a type
_TYPES_OF_FUNCTIONS = {"function", "custom"}  # OpenAI's and Anthropic's


class OtherTool(Body):
    """A tool, or the name of one, of another kind than a function that the client calls."""

    has_no_effect: ClassVar[bool] = True

    type: str | None = Field(None, description="kind of the tool")

    @property
    def label(self) -> str:
        """The tool's type, for the response header."""
        return self.type or "unknown"


def by_kind(*functions: str | None) -> Discriminator:
    """Return a discriminator between functions and other tools.

    A function in another protocol's format also counts as a function: validation then rejects it with the right
    format, while leaving it out would silently answer without the client's tool.

    Args:
        functions: Types of functions; None for tools without a type.
    """

    def kind(value: Any) -> str | None:
        if isinstance(value, dict):
            tool = cast("dict[str, Any]", value)
            is_function = tool.get("type") in functions or _looks_like_function(tool)
            return FUNCTION.tag if is_function else OTHER.tag
        return OTHER.tag if isinstance(value, OtherTool) else FUNCTION.tag if isinstance(value, Body) else None

    return Discriminator(kind)


def _looks_like_function(tool: dict[str, Any]) -> bool:
    """Whether a tool is a function in any protocol's format."""
    kind = tool.get("type")
    if kind is None:
        return not tool.keys().isdisjoint(_OF_UNTYPED_FUNCTIONS)
    if not isinstance(kind, str) or not tool.keys().isdisjoint(_OF_FUNCTIONS):
        return True
    return kind.lower() in _TYPES_OF_FUNCTIONS and "parameters" in tool


class FunctionTool(Protocol):
    """A function tool of any protocol."""

    def function_object(self) -> Mapping[str, Any]:
        """Return the function as OpenAI's object; None values are missing fields."""
        ...


def definitions_of(functions: Sequence[FunctionTool] | None) -> list[ToolDefinition] | None:
    """Return the definitions of a request's functions; None if it has no tools.

    Raises:
        ToolError: If a function is invalid, with its path in chat completions.
    """
    if functions is None:
        return None
    check_number(len(functions))
    definitions = list[ToolDefinition]()
    for i, tool in enumerate(functions):
        try:
            definitions.append(ToolDefinition.of_function(tool.function_object()))
        except ToolError as error:
            raise error.inside(f"tools[{i}].function") from None
    return definitions


def functions_of(tools: Sequence[ToolT | OtherTool] | None) -> tuple[list[ToolT] | None, Callable[[str], str]]:
    """Return the functions among the tools, and a function that translates their paths to the client's.

    Paths with an index beyond this request's functions belong to an earlier request's tools and are unchanged.
    """
    if tools is None:
        return None, str
    places = [i for i, tool in enumerate(tools) if not isinstance(tool, OtherTool)]

    def path_of(path: str) -> str:
        match = re.match(r"tools\[(\d+)\]", path)
        if match is None or int(match[1]) >= len(places):
            return path
        return f"tools[{places[int(match[1])]}]{path[match.end() :]}"

    functions = [tool for tool in tools if not isinstance(tool, OtherTool)]
    return functions, str if len(functions) == len(tools) else path_of
