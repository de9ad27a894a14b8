"""Tool fields: the tools, and which of them may or must be called."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from llamarium.errors import ToolError
from llamarium.server.dialogs import renamed
from llamarium.server.errors import of_library
from llamarium.server.fields import Body, of_table
from llamarium.server.other_tools import FUNCTION, OTHER, OtherTool, by_kind, definitions_of, functions_of
from llamarium.tokenizer.tools.request import ToolRequest


@of_table("chat tools[].function")
class Function(Body):
    """A function that the model may call."""

    name: str = Field(description="name of the function")
    description: str | None = Field(None, description="what the function does and when to call it")
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of the arguments")
    strict: bool | None = Field(None, description="true: calls follow the schema exactly, or the request is rejected")


@of_table("chat tools[]")
class Tool(Body):
    """A tool."""

    type: Literal["function"] | None = Field(None, description="kind of the tool")
    function: Function = Field(description="function that the client runs")

    def function_object(self) -> Mapping[str, Any]:
        """Return the function as OpenAI's object."""
        return dict(self.function)


AnyTool = Annotated[Annotated[Tool, FUNCTION] | Annotated[OtherTool, OTHER], by_kind("function")]


class Name(Body):
    """A function, by its name."""

    name: str = Field(description="name of the function")


class NamedTool(Body):
    """A tool, by its name."""

    type: Literal["function"] = Field(description="kind of the tool")
    function: Name = Field(description="function to call")


class AllowedTools(Body):
    """Some of the tools, and whether one has to be called."""

    mode: Literal["auto", "required"] = Field(
        description="`auto`: a tool may be called; `required`: one must be called"
    )
    tools: list[Annotated[Annotated[NamedTool, FUNCTION] | Annotated[OtherTool, OTHER], by_kind("function")]] = Field(
        min_length=1, description="tools that may be called"
    )


class ChosenTools(Body):
    """One tool that has to be called, or the choice between some."""

    type: Literal["function", "allowed_tools"] = Field(description="one function, or a choice between some tools")
    function: Name | None = Field(None, description="function that must be called")
    allowed_tools: AllowedTools | None = Field(None, description="tools that may be called")


ToolChoice = Literal["auto", "none", "required"] | ChosenTools


def tool_request(
    tools: Sequence[Tool | OtherTool] | None, choice: ToolChoice | None, parallel: bool | None
) -> tuple[ToolRequest, Callable[[str], str]]:
    """Parse a request's tool fields.

    Returns:
        The tools, and a function that translates paths of functions to the client's, as other tools are left out.

    Raises:
        ApiError: 400 if the tools are invalid, or `choice` forces a call that is not possible.
    """
    functions, path_of = functions_of(tools)
    try:
        return ToolRequest.read(definitions_of(functions), _chosen(choice), parallel), path_of
    except ToolError as error:
        raise renamed(of_library(error), path_of) from None


def _chosen(choice: ToolChoice | None) -> object:
    """Return `tool_choice` for `ToolRequest.read`, without tools other than functions."""
    if not isinstance(choice, ChosenTools):
        return choice
    chosen = choice.model_dump(exclude_none=True)
    if choice.allowed_tools is not None:
        allowed = [tool.model_dump() for tool in choice.allowed_tools.tools if isinstance(tool, NamedTool)]
        if not allowed and choice.allowed_tools.mode == "auto":
            return "none"
        chosen["allowed_tools"]["tools"] = allowed
    return chosen
