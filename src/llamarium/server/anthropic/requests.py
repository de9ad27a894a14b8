"""The requests for messages: supported fields of Anthropic's client, and refused ones."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from llamarium.server.fields import Body, by_type, of_type, with_parameters
from llamarium.server.hints import with_hints

_NO_SERVER_TOOLS = "the server calls no tools by itself"


@with_hints("messages content[]")
class TextBlock(Body):
    """A text."""

    refused: ClassVar[Mapping[str, str]] = {"citations": "answers do not cite"}

    type: Literal["text"]
    text: str


@with_hints("messages content[] of thinking")
class ThinkingBlock(Body):
    """What another model thought before its answer; it is no part of the dialog."""

    type: Literal["thinking", "redacted_thinking"]


@with_hints("messages content[]")
class ToolUseBlock(Body):
    """A call of the assistant."""

    refused: ClassVar[Mapping[str, str]] = {"caller": _NO_SERVER_TOOLS, "toolset_name": _NO_SERVER_TOOLS}

    type: Literal["tool_use"]
    id: str = Field(min_length=1)
    name: str
    input: dict[str, Any]


@with_hints("messages content[]")
class ToolResultBlock(Body):
    """The result of a call."""

    refused: ClassVar[Mapping[str, str]] = {"toolset_name": _NO_SERVER_TOOLS}

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
    """The form of an answer; it is always enforced."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


@with_hints("messages output_config")
class OutputConfig(Body):
    """The form of an answer."""

    format: JsonFormat | None = None
    effort: str | None = None  # one of the table's


@with_hints("messages tools[]")
class AnthropicTool(Body):
    """A function that the model may call; its arguments are streamed."""

    refused: ClassVar[Mapping[str, str]] = {"input_examples": "the prompt has a tool's schema alone"}

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    allowed_callers: list[Literal["direct"]] | None = Field(None, min_length=1)
    defer_loading: Literal[False] | None = None


class AnthropicToolChoice(Body):
    """Whether the model may or must call a tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


@with_hints("messages prompt")
class CountRequest(Body):
    """`POST /v1/messages/count_tokens`: the parts of a prompt."""

    dialog: ClassVar[str | None] = "messages"

    messages: list[MessageParam] = Field(min_length=1)
    model: str | None = None
    system: str | list[TextBlock] | None = None
    output_config: OutputConfig | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None


@with_hints("messages")
@with_parameters("anthropic")
class MessagesRequest(CountRequest):
    """`POST /v1/messages`."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    # not Anthropic's
    cache_salt: str | None = Field(None, min_length=1)

    refused: ClassVar[Mapping[str, str]] = {
        "container": "the server runs nothing but the model",
        "diagnostics": "nothing is stored that a prompt could be compared with",
        "inference_geo": "the model runs on this machine",
    }
