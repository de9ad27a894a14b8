"""Fields shared by several of OpenAI's requests."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from llamarium.sampling.keywords import SamplingKeywords
from llamarium.server.arguments import as_object
from llamarium.server.dialogs import encode_dialog, misplaced, missing
from llamarium.server.errors import ApiError
from llamarium.server.fields import Body, CacheSalt, ModelName, Streams, of_table, parameters_in, with_parameters
from llamarium.server.lifecycle.service import Service
from llamarium.tokenizer.tools.definition import ToolDefinition

MAX_LOGPROBS = 20

_MAX_DIGITS = 10  # keys of `logit_bias` have fewer digits


@of_table("stream_options")
class StreamFields(Body):
    """Options of a stream."""

    include_usage: bool | None = Field(None, description="true: end the stream with a chunk that has the token counts")


@with_parameters("openai")
class Sampling(Body):
    """The fields that completions and chat completions share."""

    generates: ClassVar[bool] = True

    model: ModelName = None
    stream: Streams = None
    stream_options: StreamFields | None = Field(None, description="options of a stream; requires `stream`")
    n: int | None = Field(
        None, ge=1, description="number of answers per prompt, 1 to 1,024; above 1 requires a temperature above 0"
    )
    max_tokens: int | None = Field(None, description="maximum number of tokens per answer; -1: the rest of the context")
    stop: str | list[str] | None = Field(None, description="text or texts that end the answer and are not part of it")
    logit_bias: dict[str, float] | None = Field(
        None, description="bias added to the logits of tokens, -100 to 100, by token id"
    )
    # vLLM's
    stop_token_ids: list[int] | None = Field(None, description="ids of tokens that end the answer")
    ignore_eos: bool | None = Field(None, description="true: only `stop` and `stop_token_ids` end the answer")
    cache_salt: CacheSalt = None
    return_token_ids: bool | None = Field(None, description="true: also return the token ids of prompt and answer")
    prompt_logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description="number of alternatives per prompt token to report with log-probabilities",
    )


def sampler_options(body: Sampling) -> SamplingKeywords:
    """Return a request's sampling options, without `logprobs` and `max_tokens`."""
    options = parameters_in(body, "openai")
    options["n"], options["stop"], options["stop_token_ids"] = body.n, body.stop, body.stop_token_ids
    options["prompt_logprobs"] = body.prompt_logprobs
    if body.prompt_logprobs is not None and body.stream:
        raise ApiError(400, "prompt_logprobs cannot be streamed; leave stream out", param="prompt_logprobs")
    if body.logit_bias is not None:
        keys = body.logit_bias.keys()
        if not all(key.isascii() and key.isdigit() and len(key) < _MAX_DIGITS for key in keys):
            raise ApiError(400, "logit_bias has a key that is not a token id", param="logit_bias")
        options["logit_bias"] = {int(key): bias for key, bias in body.logit_bias.items()}
    return options


def shows_usage(body: Sampling) -> bool:
    """Whether a stream with options ends with the usage; ApiError 400 if the request does not stream."""
    assert body.stream_options is not None
    if not body.stream:
        raise ApiError(400, "stream_options requires stream; set stream to true", param="stream_options")
    return body.stream_options.include_usage or False


@of_table("chat messages[].content[]")
class TextPart(Body):
    """A part of a message."""

    type: Literal["text"] = Field(description="kind of the part")
    text: str = Field(description="text of the part")


@of_table("chat messages[].tool_calls[].function")
class CalledFunction(Body):
    """Name and arguments of a call."""

    name: str = Field(description="name of the function")
    arguments: str = Field(description="arguments as the text of a JSON object")


@of_table("chat messages[].tool_calls[]")
class MessageToolCall(Body):
    """A call in a message of the assistant."""

    id: str = Field(min_length=1, description="id of the call, which its result repeats")
    type: Literal["function"] = Field(description="kind of the tool")
    function: CalledFunction = Field(description="called function")


@of_table("chat messages[]")
class Message(Body):
    """A message of a dialog."""

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        description="author of the message; `developer` is `system`"
    )
    content: str | list[TextPart] | None = Field(None, description="text, or a list of text parts")
    tool_calls: list[MessageToolCall] | None = Field(None, min_length=1, description="calls of the assistant")
    tool_call_id: str | None = Field(None, description="id of the call that a message of role `tool` answers")

    def plain(self, where: str) -> dict[str, Any]:
        """Return the message as a dictionary, its content as text or parts; `where` is its path in the request."""
        if self.content is None and self.tool_calls is None:
            raise missing(f"{where}.content")
        if self.role == "tool" and self.tool_call_id is None:
            raise missing(f"{where}.tool_call_id")
        for name, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
            if self.role != role and getattr(self, name) is not None:
                reason = f"is only allowed with role {role}; this message has role {self.role}"
                raise misplaced(f"{where}.{name}", reason)

        content = self.content
        if isinstance(content, list):
            content = [{"type": part.type, "text": part.text} for part in content]
        plain: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        if self.tool_calls:
            call_fields = {"id": True, "type": True, "function": {"name", "arguments"}}
            plain["tool_calls"] = [call.model_dump(include=call_fields) for call in self.tool_calls]
            for call in plain["tool_calls"]:
                call["function"]["arguments"] = as_object(call["function"]["arguments"])
        if self.tool_call_id is not None:
            plain["tool_call_id"] = self.tool_call_id
        return plain | self.model_dump(include={"name", "reasoning_content"}, exclude_none=True)


def dialog_ids(
    service: Service, messages: Sequence[Message], tools: Sequence[ToolDefinition] = (), **options: Any
) -> list[int]:
    """Return the token ids of a dialog; arguments as for `encode_dialog`."""
    plain = [message.plain(f"messages[{i}]") for i, message in enumerate(messages)]
    return encode_dialog(service, plain, tools, **options)
