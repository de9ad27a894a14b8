"""The bodies of requests for messages: supported and rejected fields of Anthropic's client."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from llamarium.server.fields import Body, by_type, of_table, of_type, with_parameters
from llamarium.server.other_tools import FUNCTION, OTHER, OtherTool, by_kind


@of_table("messages content[]", "messages content[] of text")
class TextBlock(Body):
    """A text."""

    type: Literal["text"]
    text: str


@of_table("messages content[] of thinking")
class ThinkingBlock(Body):
    """What another model thought before its answer; it is no part of the dialog."""

    type: Literal["thinking", "redacted_thinking"]


@of_table("messages content[]", "messages content[] of tool_use")
class ToolUseBlock(Body):
    """A call of the assistant."""

    type: Literal["tool_use"]
    id: str = Field(min_length=1)
    name: str
    input: dict[str, Any]


@of_table("messages content[]", "messages content[] of tool_result")
class ToolResultBlock(Body):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None


Block = Annotated[
    Annotated[TextBlock, of_type("text")]
    | Annotated[ToolUseBlock, of_type("tool_use")]
    | Annotated[ToolResultBlock, of_type("tool_result")]
    | Annotated[ThinkingBlock, of_type("thinking")]
    | Annotated[ThinkingBlock, of_type("redacted_thinking")],
    by_type(),
]


class MessageParam(Body):
    """A message of a dialog."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class JsonFormat(Body):
    """The form of an answer; it is enforced, except by keywords that the answer's header names."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


@of_table("messages output_config")
class OutputConfig(Body):
    """The form of an answer."""

    format: JsonFormat | None = None
    effort: str | None = None  # listed in the field table


@of_table("messages tools[]")
class AnthropicTool(Body):
    """A function that the model may call; its arguments are streamed."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None

    def function_object(self) -> dict[str, Any]:
        """Return the function as OpenAI's object."""
        return {
            "name": self.name,
            "description": self.description,
            "parameters": self.input_schema,
            "strict": self.strict,
        }


AnyTool = Annotated[Annotated[AnthropicTool, FUNCTION] | Annotated[OtherTool, OTHER], by_kind("custom", None)]


class AnthropicToolChoice(Body):
    """Whether the model may or must call a tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


@of_table("messages prompt")
class CountRequest(Body):
    """`POST /v1/messages/count_tokens`: the parts of a prompt."""

    dialog: ClassVar[str | None] = "messages"

    messages: list[MessageParam] = Field(min_length=1)
    model: str | None = None
    system: str | list[TextBlock] | None = None
    output_config: OutputConfig | None = None
    tools: list[AnyTool] | None = None
    tool_choice: AnthropicToolChoice | None = None


@of_table("generation", "messages")
@with_parameters("anthropic")
class MessagesRequest(CountRequest):
    """`POST /v1/messages`."""

    generates: ClassVar[bool] = True

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    # not Anthropic's
    cache_salt: str | None = Field(None, min_length=1)
