"""The request for a response: supported fields of OpenAI's client, and refused ones."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from llamarium.sampling.grammar.description import Grammar
from llamarium.server.answering import Form
from llamarium.server.dialogs import missing
from llamarium.server.errors import ApiError
from llamarium.server.fields import Body, by_type, of_type, with_parameters
from llamarium.server.hints import with_hints
from llamarium.server.openai.fields import MAX_LOGPROBS
from llamarium.server.openai.forms import schema_reader
from llamarium.server.openai.responses.items import Item

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


class TextFormat(Body):
    """The form of an answer; a schema is always enforced, and `strict` closes its objects (`--open-objects`)."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


@with_hints("responses text")
class TextConfig(Body):
    """The format of an answer."""

    format: TextFormat | None = None


@with_hints("responses reasoning")
class Reasoning(Body):
    """How the model reasons before its answer."""

    effort: str | None = None  # one of the table's


@with_hints("stream_options")
class ResponseStreamFields(Body):
    """Options of a stream."""


@with_hints("responses")
@with_parameters("responses")
class ResponseRequest(Body):
    """`POST /v1/responses`."""

    dialog: ClassVar[str | None] = "input"

    input: str | list[Item]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: TextConfig | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include: list[str] | None = None  # some of the table's
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    stream: bool | None = None
    stream_options: ResponseStreamFields | None = None

    background: Literal[False] | None = None
    previous_response_id: str | None = None
    reasoning: Reasoning | None = None
    store: bool | None = None
    # not OpenAI's
    cache_salt: str | None = Field(None, min_length=1)

    refused: ClassVar[Mapping[str, str]] = {
        "access_programs": "there are no such programs here",
        "background_options": "a response is made while its request waits",
        "conversation": "give previous_response_id (--store-responses), or the whole dialog as input",
        "image": "this server takes and answers text",
        "moderation": "answers are not moderated",
        "prompt": "there are no stored prompts; give instructions and input",
    }


def form_of(body: ResponseRequest) -> Form | None:
    """Return the form of a request's answer, or None for any text."""
    asked = None if body.text is None else body.text.format
    if asked is None:
        return None
    own = {"name": asked.name, "schema": asked.schema_, "description": asked.description, "strict": asked.strict}
    if asked.type != "json_schema":
        for name, value in own.items():
            if value is not None:
                param = f"text.format.{name}"
                raise ApiError(400, f"{param} is given, and text.format.type is {asked.type}", param=param)
        return None if asked.type == "text" else ("text.format", lambda _: Grammar.json_object())
    for name in ("name", "schema"):
        if own[name] is None:
            raise missing(f"text.format.{name}")
    return "text.format.schema", schema_reader(asked.schema_ or {}, asked.strict)
