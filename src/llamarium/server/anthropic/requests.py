"""The bodies of requests for messages: supported and rejected fields of Anthropic's client."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from llamarium.server.fields import Body, CacheSalt, ModelName, Streams, by_type, of_table, of_type, with_parameters
from llamarium.server.other_tools import FUNCTION, OTHER, OtherTool, by_kind


@of_table("messages content[]", "messages content[] of text")
class TextBlock(Body):
    """A text."""

    type: Literal["text"] = Field(description="kind of the block")
    text: str = Field(description="text of the block")


@of_table("messages content[] of thinking")
class ThinkingBlock(Body):
    """What another model thought before its answer; it is no part of the dialog."""

    type: Literal["thinking", "redacted_thinking"] = Field(description="kind of the block")


@of_table("messages content[]", "messages content[] of tool_use")
class ToolUseBlock(Body):
    """A call of the assistant."""

    type: Literal["tool_use"] = Field(description="kind of the block")
    id: str = Field(min_length=1, description="id of the call, which its result repeats")
    name: str = Field(description="name of the tool")
    input: dict[str, Any] = Field(description="arguments of the call")


@of_table("messages content[]", "messages content[] of tool_result")
class ToolResultBlock(Body):
    """The result of a call."""

    type: Literal["tool_result"] = Field(description="kind of the block")
    tool_use_id: str = Field(description="id of the call")
    content: str | list[TextBlock] | None = Field(None, description="result of the call, as text")
    is_error: bool | None = Field(None, description="true: the call failed")


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

    role: Literal["user", "assistant", "system"] = Field(description="author of the message")
    content: str | list[Block] = Field(description="text, or a list of blocks")


class JsonFormat(Body):
    """The form of an answer; it is enforced, except by keywords that the answer's header names."""

    type: Literal["json_schema"] = Field(description="kind of the format")
    schema_: dict[str, Any] = Field(alias="schema", description="JSON schema of the answer")


@of_table("messages output_config")
class OutputConfig(Body):
    """The form of an answer."""

    format: JsonFormat | None = Field(default=None, description="output format")
    # listed in the field table
    effort: str | None = Field(default=None, description="value of `reasoning_effort` for chat templates that use it")


@of_table("messages tools[]")
class AnthropicTool(Body):
    """A function that the model may call; its arguments are streamed."""

    type: Literal["custom"] | None = Field(None, description="kind of the tool")
    name: str = Field(description="name of the tool")
    description: str | None = Field(None, description="what the tool does and when to call it")
    input_schema: dict[str, Any] = Field(description="JSON schema of the arguments")
    strict: bool | None = Field(None, description="true: calls follow the schema exactly, or the request is rejected")

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

    type: Literal["auto", "any", "tool", "none"] = Field(description="whether tools may or must be called")
    name: str | None = Field(None, description="tool that must be called, with type `tool`")
    disable_parallel_tool_use: bool | None = Field(None, description="true: at most one call per answer")


@of_table("messages prompt")
class CountRequest(Body):
    """`POST /v1/messages/count_tokens`: the parts of a prompt."""

    dialog: ClassVar[str | None] = "messages"

    messages: list[MessageParam] = Field(min_length=1, description="dialog, oldest message first")
    model: ModelName = None
    system: str | list[TextBlock] | None = Field(None, description="system message")
    output_config: OutputConfig | None = Field(None, description="output format")
    tools: list[AnyTool] | None = Field(None, description="tools that the model may call")
    tool_choice: AnthropicToolChoice | None = Field(None, description="whether tools may or must be called, and which")


@of_table("generation", "messages")
@with_parameters("anthropic")
class MessagesRequest(CountRequest):
    """`POST /v1/messages`."""

    generates: ClassVar[bool] = True

    max_tokens: int = Field(description="maximum number of tokens of the answer")
    stream: Streams = None
    stop_sequences: list[str] | None = Field(None, description="texts that end the answer and are not part of it")
    # not Anthropic's
    cache_salt: CacheSalt = None
