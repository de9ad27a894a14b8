"""The requests for completions: supported fields of OpenAI's client, and refused ones."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from llamarium.server.openai.fields import MAX_LOGPROBS, Message
from llamarium.server.openai.forms import Formed
from llamarium.server.openai.tools import Tool, ToolChoice


class ChatRequest(Formed):
    """`POST /v1/chat/completions`."""

    dialog: ClassVar[str | None] = "messages"

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    modalities: list[Literal["text"]] | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    verbosity: Literal["medium"] | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    refused: ClassVar[Mapping[str, str]] = {
        "audio": "this server takes and answers text",
        "function_call": "give tool_choice",
        "functions": "give tools",
        "moderation": "answers are not moderated",
        "prediction": "answers are not predicted by the client",
        "prompt_cache_options": "prefixes are found by themselves, for as long as there is memory",
        "prompt_cache_retention": "prefixes are kept for as long as there is memory",
        "reasoning_effort": "the model does not reason apart from its answer",
        "web_search_options": "the server does not search the web",
    }


class CompletionRequest(Formed):
    """`POST /v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = None

    refused: ClassVar[Mapping[str, str]] = {"suffix": "the model continues a text, and does not fill gaps"}
