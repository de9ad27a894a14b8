"""Tools of kinds that run on a provider's servers, or that no local model was made for: they are left out and named.

A request that forces one is refused by its `tool_choice`; any other has the rest of its tools.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeVar, cast

from pydantic import Discriminator

from llamarium.errors import ToolError
from llamarium.server.fields import Body, of_type
from llamarium.tokenizer.tools.definition import ToolDefinition, check_number

ToolT = TypeVar("ToolT", bound=Body)

FUNCTION, OTHER = of_type("function"), of_type("other")

_OF_FUNCTIONS = {"function", "input_schema", "inputSchema"}  # no other tool has these
_OF_UNTYPED_FUNCTIONS = {*_OF_FUNCTIONS, "parameters", "name"}  # hosted tools may have these, beside a type
_TYPES_OF_FUNCTIONS = {"function", "custom"}  # in either protocol


class OtherTool(Body):
    """A tool, or the name of one, of another kind than a function that the client calls."""

    has_no_effect: ClassVar[bool] = True

    type: str | None = None

    @property
    def label(self) -> str:
        """The kind, which the answer's header names."""
        return self.type or "unknown"


def by_kind(*functions: str | None) -> Discriminator:
    """Return a discriminator of functions, which have one of some types (None: without any), and other tools.

    A function that is spelled as another protocol has it counts as a function: it is refused with the right spelling,
    where leaving it out would answer without the client's tools.
    """

    def kind(value: Any) -> str | None:
        if isinstance(value, dict):
            given = cast("dict[str, Any]", value)
            is_function = given.get("type") in functions or _looks_like_function(given)
            return FUNCTION.tag if is_function else OTHER.tag
        return OTHER.tag if isinstance(value, OtherTool) else FUNCTION.tag if isinstance(value, Body) else None

    return Discriminator(kind)


def _looks_like_function(tool: dict[str, Any]) -> bool:
    """Whether a tool is a function in any spelling."""
    found = tool.get("type")
    if found is None:
        return not tool.keys().isdisjoint(_OF_UNTYPED_FUNCTIONS)
    if not isinstance(found, str) or not tool.keys().isdisjoint(_OF_FUNCTIONS):
        return True
    return found.lower() in _TYPES_OF_FUNCTIONS and "parameters" in tool


class FunctionTool(Protocol):
    """A tool of any protocol that is a function."""

    def function_object(self) -> Mapping[str, Any]:
        """Return OpenAI's object of the function; None is a field that is not there."""
        ...


def definitions_of(functions: Sequence[FunctionTool] | None) -> list[ToolDefinition] | None:
    """Read the functions among a request's tools; ToolError by the path in chat completions, as `ToolRequest.read`."""
    if functions is None:
        return None
    check_number(len(functions))
    found = list[ToolDefinition]()
    for i, tool in enumerate(functions):
        try:
            found.append(ToolDefinition.of_function(tool.function_object()))
        except ToolError as error:
            raise error.inside(f"tools[{i}].function") from None
    return found


def functions_of(tools: Sequence[ToolT | OtherTool] | None) -> tuple[list[ToolT] | None, Callable[[str], str]]:
    """Return the functions among some tools, and what translates a path among these to the client's own.

    A place that this request does not have is an earlier request's, and stays.
    """
    if tools is None:
        return None, str
    places = [i for i, tool in enumerate(tools) if not isinstance(tool, OtherTool)]

    def path_of(path: str) -> str:
        found = re.match(r"tools\[(\d+)\]", path)
        if found is None or int(found[1]) >= len(places):
            return path
        return f"tools[{places[int(found[1])]}]{path[found.end() :]}"

    kept = [tool for tool in tools if not isinstance(tool, OtherTool)]
    return kept, str if len(kept) == len(tools) else path_of
