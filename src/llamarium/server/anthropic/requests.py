"""The requests for messages: supported fields of Anthropic's client, and refused ones."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from llamarium.server.fields import Body, by_type, of_type, with_parameters

_NO_REASONING = "the model does not reason apart from its answer"
_NO_SERVER_TOOLS = "the server calls no tools by itself"


class CacheControl(Body):
    """The mark of a prefix to cache; without effect, since prefixes are always cached."""

    refused: ClassVar[Mapping[str, str]] = {"ttl": "prefixes are kept for as long as there is memory"}

    type: Literal["ephemeral"]


class TextBlock(Body):
    """A text."""

    refused: ClassVar[Mapping[str, str]] = {"citations": "answers do not cite"}

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None


class ToolUseBlock(Body):
    """A call of the assistant."""

    refused: ClassVar[Mapping[str, str]] = {"caller": _NO_SERVER_TOOLS, "toolset_name": _NO_SERVER_TOOLS}

    type: Literal["tool_use"]
    id: str = Field(min_length=1)
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None


class ToolResultBlock(Body):
    """The result of a call."""

    refused: ClassVar[Mapping[str, str]] = {"toolset_name": _NO_SERVER_TOOLS}

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


Block = Annotated[
    Annotated[TextBlock, of_type("text")]
    | Annotated[ToolUseBlock, of_type("tool_use")]
    | Annotated[ToolResultBlock, of_type("tool_result")],
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


class OutputConfig(Body):
    """The form of an answer."""

    refused: ClassVar[Mapping[str, str]] = {"effort": _NO_REASONING}

    format: JsonFormat | None = None


class Thinking(Body):
    """Whether the model reasons before its answer."""

    refused: ClassVar[Mapping[str, str]] = {"budget_tokens": _NO_REASONING, "display": _NO_REASONING}

    type: Literal["disabled"]


class Metadata(Body):
    """About the user; without effect."""

    user_id: str | None = None


class AnthropicTool(Body):
    """A function that the model may call; its arguments are streamed."""

    refused: ClassVar[Mapping[str, str]] = {"input_examples": "the prompt has a tool's schema alone"}

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl | None = None
    allowed_callers: list[Literal["direct"]] | None = Field(None, min_length=1)
    defer_loading: Literal[False] | None = None
    eager_input_streaming: Literal[True] | None = None


class AnthropicToolChoice(Body):
    """Whether the model may or must call a tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class CountRequest(Body):
    """`POST /v1/messages/count_tokens`: the parts of a prompt."""

    dialog: ClassVar[str | None] = "messages"

    messages: list[MessageParam] = Field(min_length=1)
    model: str | None = None
    system: str | list[TextBlock] | None = None
    cache_control: CacheControl | None = None
    output_config: OutputConfig | None = None
    thinking: Thinking | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    speed: Literal["standard"] | None = None

    refused: ClassVar[Mapping[str, str]] = {
        "user_profile_id": "there are no profiles here",
        "workspace_id": "there are no workspaces here",
    }


@with_parameters("anthropic")
class MessagesRequest(CountRequest):
    """`POST /v1/messages`."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    # not Anthropic's
    cache_salt: str | None = Field(None, min_length=1)

    refused: ClassVar[Mapping[str, str]] = {
        **CountRequest.refused,
        "container": "the server runs nothing but the model",
        "diagnostics": "nothing is stored that a prompt could be compared with",
        "inference_geo": "the model runs on this machine",
    }
