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

    messages: list[Message] = Field(min_length=1, description="dialog, oldest message first")
    max_completion_tokens: int | None = Field(None, description="another name of `max_tokens`")
    logprobs: bool | None = Field(None, description="true: return log-probabilities of the answer's tokens")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="number of alternatives per token to report; requires `logprobs`"
    )

    # listed in the field table
    reasoning_effort: str | None = Field(None, description="value for chat templates that use this variable")
    # vLLM's
    documents: list[dict[str, Any]] | None = Field(None, description="documents for chat templates that use them (RAG)")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="variables of the chat template, by name")
    add_generation_prompt: bool | None = Field(
        None, description="false: end the prompt with the last message, without the header of an answer"
    )
    continue_final_message: bool | None = Field(
        None, description="true: continue the last message, which is the assistant's"
    )

    modalities: list[Literal["text"]] | None = Field(None, description="kinds of output; only text is supported")
    tools: list[AnyTool] | None = Field(None, description="tools that the model may call")
    tool_choice: ToolChoice | None = Field(None, description="whether tools may or must be called, and which")
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call per answer")


@of_table("generation", "completions", "text completions")
class CompletionRequest(Intervened):
    """`POST /v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]] = Field(description="text, token ids, or a list of either")
    echo: bool | None = Field(None, description="true: return the prompt before the answer")
    logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description="number of most likely tokens per position to report with log-probabilities",
    )
    best_of: int | None = Field(None, description="number of candidates; only the value of `n` is supported")
