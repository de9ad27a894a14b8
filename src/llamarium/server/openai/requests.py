"""The bodies of chat completions and completions: supported and rejected fields of OpenAI's client."""

from typing import Any, ClassVar, Literal

from pydantic import Field

from llamarium.server.fields import of_table
from llamarium.server.openai.fields import MAX_LOGPROBS, Message
from llamarium.server.openai.interventions import Intervened
from llamarium.server.openai.tools import AnyTool, ToolChoice


@of_table("generation", "completions", "chat")
class ChatRequest(Intervened):
    """`POST /v1/chat/completions`."""

    dialog: ClassVar[str | None] = "messages"

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    reasoning_effort: str | None = None  # listed in the field table
    # vLLM's
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    modalities: list[Literal["text"]] | None = None
    tools: list[AnyTool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None


@of_table("generation", "completions", "text completions")
class CompletionRequest(Intervened):
    """`POST /v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = None
