"""Fields about tools of responses: those of chat completions, one level higher."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from llamarium.server.fields import Body, by_type, of_type

NAMES = {
    r"tool_choice\.allowed_tools(\.tools\[\d+\])?(\.function)?": r"tool_choice\1",
    r"(tools\[\d+\]|input\[\d+\]|tool_choice)\.function": r"\1",
    r"(input\[\d+\])\.(tool_call_id|id)": r"\1.call_id",
}
"""Names of `Dialog`: from paths of chat completions to those of responses."""


class FunctionTool(Body):
    """A function that the model may call."""

    refused: ClassVar[Mapping[str, str]] = {
        "async": "the client calls its functions itself",
        "output_schema": "the prompt has the schema of a function's arguments alone",
    }

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    allowed_callers: list[Literal["direct"]] | None = Field(None, min_length=1)
    defer_loading: Literal[False] | None = None

    def to_chat(self) -> dict[str, Any]:
        """Return it in the form of chat completions."""
        own = self.model_dump(include={"name", "description", "parameters", "strict"}, exclude_none=True)
        return {"type": "function", "function": own}


class NamedFunction(Body):
    """A function, by its name."""

    type: Literal["function"]
    name: str

    def to_chat(self) -> dict[str, Any]:
        """Return it in the form of chat completions."""
        return {"type": "function", "function": {"name": self.name}}


class AllowedFunctions(Body):
    """The choice between some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedFunction] = Field(min_length=1)

    def to_chat(self) -> dict[str, Any]:
        """Return it in the form of chat completions."""
        allowed = {"mode": self.mode, "tools": [tool.to_chat() for tool in self.tools]}
        return {"type": "allowed_tools", "allowed_tools": allowed}


ChosenFunctions = Annotated[
    Annotated[NamedFunction, of_type("function")] | Annotated[AllowedFunctions, of_type("allowed_tools")], by_type()
]
ToolChoice = Literal["none", "auto", "required"] | ChosenFunctions
