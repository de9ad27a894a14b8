"""The body of a request for a response: supported and rejected fields of OpenAI's client."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from llamarium.sampling.grammar.description import Grammar
from llamarium.server.answering import Form
from llamarium.server.dialogs import missing
from llamarium.server.errors import ApiError
from llamarium.server.fields import Body, CacheSalt, ModelName, Streams, by_type, of_table, of_type, with_parameters
from llamarium.server.openai.fields import MAX_LOGPROBS
from llamarium.server.openai.forms import schema_reader
from llamarium.server.openai.responses.items import Item
from llamarium.server.other_tools import FUNCTION, OTHER, OtherTool, by_kind

NAMES = {
    r"tool_choice\.allowed_tools(\.tools\[\d+\])?(\.function)?": r"tool_choice\1",
    r"(tools\[\d+\]|input\[\d+\]|tool_choice)\.function": r"\1",
    r"(input\[\d+\])\.(tool_call_id|id)": r"\1.call_id",
}
"""Argument of `Dialog`: translates paths in chat completions to paths in responses."""


@of_table("responses tools[]")
class FunctionTool(Body):
    """A function that the model may call."""

    type: Literal["function"] | None = Field(None, description="kind of the tool")
    name: str = Field(description="name of the function")
    description: str | None = Field(None, description="what the function does and when to call it")
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of the arguments")
    strict: bool | None = Field(None, description="true: calls follow the schema exactly, or the request is rejected")

    def function_object(self) -> dict[str, Any]:
        """Return the function in the format of chat completions."""
        return {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
            "strict": self.strict,
        }


AnyTool = Annotated[Annotated[FunctionTool, FUNCTION] | Annotated[OtherTool, OTHER], by_kind("function")]


class NamedFunction(Body):
    """A function, by its name."""

    type: Literal["function"] = Field(description="kind of the tool")
    name: str = Field(description="name of the function")

    def to_chat(self) -> dict[str, Any]:
        """Return the choice in the format of chat completions."""
        return {"type": "function", "function": {"name": self.name}}


class AllowedFunctions(Body):
    """The choice between some of the tools."""

    type: Literal["allowed_tools"] = Field(description="kind of the choice")
    mode: Literal["auto", "required"] = Field(
        description="`auto`: a tool may be called; `required`: one must be called"
    )
    tools: list[Annotated[Annotated[NamedFunction, FUNCTION] | Annotated[OtherTool, OTHER], by_kind("function")]] = (
        Field(min_length=1, description="tools that may be called")
    )

    def to_chat(self) -> dict[str, Any] | str:
        """Return the choice in the format of chat completions, without tools other than functions."""
        functions = [tool.to_chat() for tool in self.tools if isinstance(tool, NamedFunction)]
        if not functions and self.mode == "auto":
            return "none"
        allowed = {"mode": self.mode, "tools": functions}
        return {"type": "allowed_tools", "allowed_tools": allowed}


ChosenFunctions = Annotated[
    Annotated[NamedFunction, of_type("function")] | Annotated[AllowedFunctions, of_type("allowed_tools")], by_type()
]
ToolChoice = Literal["none", "auto", "required"] | ChosenFunctions


class TextFormat(Body):
    """The form of an answer; a schema is enforced, except by keywords that the answer's header names.

    `strict` refuses those keywords, and closes objects (`--open-objects`).
    """

    type: Literal["text", "json_object", "json_schema"] = Field(
        description="any text, any JSON object, or a JSON schema"
    )
    name: str | None = Field(None, description="name of the schema; without effect")  # without effect
    description: str | None = Field(None, description="description of the schema; without effect")
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="JSON schema of the answer")
    strict: bool | None = Field(
        None, description="true: reject a schema that cannot be enforced completely, and close objects"
    )


@of_table("responses text")
class TextConfig(Body):
    """The format of an answer."""

    format: TextFormat | None = Field(None, description="output format")


@of_table("responses reasoning")
class Reasoning(Body):
    """How the model reasons before its answer."""

    # listed in the field table
    effort: str | None = Field(None, description="value of `reasoning_effort` for chat templates that use it")


@of_table("stream_options")
class ResponseStreamFields(Body):
    """Options of a stream."""


@of_table("generation", "responses")
@with_parameters("responses")
class ResponseRequest(Body):
    """`POST /v1/responses`."""

    generates: ClassVar[bool] = True

    dialog: ClassVar[str | None] = "input"

    input: str | list[Item] = Field(description="text, or a list of items")
    model: ModelName = None
    instructions: str | None = Field(None, description="system message before `input`")
    max_output_tokens: int | None = Field(
        None, description="maximum number of tokens of the answer (default: the rest of the context)"
    )
    text: TextConfig | None = Field(None, description="output format")
    tools: list[AnyTool] | None = Field(None, description="tools that the model may call")
    tool_choice: ToolChoice | None = Field(None, description="whether tools may or must be called, and which")
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call per answer")
    # values listed in the field table
    include: list[str] | None = Field(
        None, description="`message.output_text.logprobs`: return log-probabilities of the answer's tokens"
    )
    top_logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description="number of alternatives per token to report; requires log-probabilities in `include`",
    )
    stream: Streams = None
    stream_options: ResponseStreamFields | None = Field(None, description="options of a stream; requires `stream`")

    background: Literal[False] | None = Field(None, description="only false is supported")
    previous_response_id: str | None = Field(None, description="id of a stored response that `input` continues")
    reasoning: Reasoning | None = Field(None, description="options for chat templates of reasoning models")
    store: bool | None = Field(None, description="true: store the response; requires `--store-responses`")
    # not OpenAI's
    cache_salt: CacheSalt = None


def form_of(body: ResponseRequest) -> Form | None:
    """Return the output format of a request, or None for any text."""
    text_format = None if body.text is None else body.text.format
    if text_format is None:
        return None
    schema_fields = {
        "name": text_format.name,
        "schema": text_format.schema_,
        "description": text_format.description,
        "strict": text_format.strict,
    }
    if text_format.type != "json_schema":
        for name, value in schema_fields.items():
            if value is not None:
                param = f"text.format.{name}"
                raise ApiError(400, f"{param} is set, but text.format.type is {text_format.type}", param=param)
        return None if text_format.type == "text" else ("text.format", lambda _: Grammar.json_object())
    if text_format.schema_ is None:
        raise missing("text.format.schema")
    return "text.format.schema", schema_reader(text_format.schema_, text_format.strict)
