"""Hints: fields that may be left out without making an answer wrong, so that they are taken and have no effect.

`HINTS` is the table of all of them. A body takes its rows as fields by `with_hints`, so that their types are checked.
`note_hints` finds those that a request gives: the answer's header and the log name them, and `--strict-fields` refuses
them. docs/reference/server.md lists the table, and says why.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, create_model

from llamarium.server.errors import ApiError
from llamarium.server.faults import Path, spelled
from llamarium.server.fields import Body
from llamarium.server.lifecycle.service import Service

HEADER = "x-llamarium-no-effect"
"""The header of an answer that names the request's hints."""

ModelT = TypeVar("ModelT", bound=BaseModel)
Objects = list[dict[str, Any]]
Level = Literal["low", "medium", "high"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Status = Literal["in_progress", "completed", "incomplete"]
Tier = Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"]
LOGPROBS = "message.output_text.logprobs"
"""What a response may include; other things of `Included` have no effect."""
Included = Literal[
    "code_interpreter_call.outputs", "computer_call_output.output.image_url", "file_search_call.results",
    "message.input_image.image_url", "message.output_text.logprobs", "reasoning.encrypted_content",
    "web_search_call.action.sources", "web_search_call.results",
]  # fmt: skip


class CacheControl(Body):
    """The mark of a prefix to cache."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    scope: str | None = None


class Thinking(Body):
    """Whether the model reasons before its answer."""

    type: Literal["disabled", "enabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class Metadata(Body):
    """About the user."""

    user_id: str | None = None


_CACHED: Mapping[str, Any] = {"cache_control": CacheControl}
_OPENAI: Mapping[str, Any] = {
    "metadata": dict[str, str], "prompt_cache_key": str, "prompt_cache_options": dict[str, Any],
    "prompt_cache_retention": Literal["in_memory", "24h"], "safety_identifier": str, "service_tier": Tier,
    "store": Literal[False], "user": str,
}  # fmt: skip
HINTS: Mapping[str, Mapping[str, Any]] = {
    "headers": {"anthropic-beta": str, "openai-beta": str},
    "completions": {"user": str},
    "embeddings": {"user": str},
    "stream_options": {"include_obfuscation": bool},
    "chat": {
        **_OPENAI, "prediction": dict[str, Any], "reasoning": dict[str, Any], "reasoning_effort": Effort,
        "thinking": Thinking, "verbosity": Level,
    },
    "chat messages[]": {
        **_CACHED, "annotations": Objects, "name": str, "parsed": Any, "provider_specific_fields": dict[str, Any],
        "reasoning": str, "reasoning_content": str, "thinking_blocks": Objects,
    },
    "chat messages[].content[]": {**_CACHED, "prompt_cache_breakpoint": dict[str, Any]},
    "chat messages[].tool_calls[]": {"index": int, "provider_specific_fields": dict[str, Any]},
    "chat messages[].tool_calls[].function": {"parsed_arguments": Any},
    "chat tools[]": _CACHED,
    "chat tools[].function": {"return": dict[str, Any]},
    "responses": {
        **_OPENAI, "client_metadata": dict[str, str], "context_management": Objects, "include": list[Included],
        "max_tool_calls": int, "store": bool, "truncation": Literal["disabled"],
    },
    "responses reasoning": {"context": str, "effort": Effort, "generate_summary": str, "mode": str, "summary": str},
    "responses text": {"verbosity": Level},
    "responses input[]": {"id": str, "status": Status},
    "responses input[] of message": {"phase": str},
    "responses input[] of reasoning": {"content": Objects, "encrypted_content": str, "summary": Objects},
    "responses input[].content[]": {
        "annotations": Objects, "logprobs": Objects, "prompt_cache_breakpoint": dict[str, Any],
    },
    "messages": {"metadata": Metadata, "service_tier": Literal["auto", "standard_only"]},
    "messages prompt": {
        **_CACHED, "context_management": dict[str, Any], "speed": Literal["standard", "fast"], "thinking": Thinking,
        "user_profile_id": str, "workspace_id": str,
    },
    "messages output_config": {"effort": Effort},
    "messages content[]": _CACHED,
    "messages content[] of thinking": {"data": str, "signature": str, "thinking": str},
    "messages tools[]": {**_CACHED, "eager_input_streaming": bool},
}  # fmt: skip
"""The names of hints and the kinds of their values, by the object that holds them."""


def with_hints(holder: str) -> Callable[[type[ModelT]], type[ModelT]]:
    """Return a decorator that adds an optional field for each of a holder's hints."""

    def extended(model: type[ModelT]) -> type[ModelT]:
        added: dict[str, Any] = {name: (kind | None, None) for name, kind in HINTS[holder].items()}
        made = create_model(model.__name__, __base__=model, __module__=model.__module__, __doc__=model.__doc__, **added)
        made.hints = getattr(model, "hints", frozenset()) | added.keys()  # pyright: ignore[reportAttributeAccessIssue]
        return made

    return extended


def note_hints(body: Body, scope: Mapping[str, Any], service: Service) -> None:
    """Note a request's hints for its answer and its line in the log; ApiError 400 for one, with `strict_fields`."""
    sent = {name.decode("latin-1") for name, _ in scope["headers"]}
    found: list[Path] = [(name,) for name in HINTS["headers"] if name in sent]
    found += _given(body, service, ())
    if found and service.settings.strict_fields:
        param = spelled(found[0])
        message = f"{param} has no effect here; leave it out, or start the server without --strict-fields"
        raise ApiError(400, message, code="unsupported_parameter", param=param)
    if names := dict.fromkeys(spelled(path, numbers=False) for path in found):
        scope["notes"]["no_effect"] = ",".join(names)


def _given(value: Any, service: Service, path: Path) -> Iterator[Path]:
    """Yield the paths of the hints in a validated value."""
    if isinstance(value, list) and value and isinstance(value[0], Body):
        for i, item in enumerate(value):
            yield from _given(item, service, (*path, i))
    elif isinstance(value, Body):
        given = {name: item for name in type(value).model_fields if (item := getattr(value, name)) is not None}
        for name, item in given.items():
            if name not in value.hints:
                yield from _given(item, service, (*path, name))
            elif not _has_effect(name, item, service):
                yield (*path, name)


def _has_effect(name: str, value: Any, service: Service) -> bool:
    """Whether a hint has an effect after all, since the model's chat template reads it, say."""
    form = None if service.loaded is None else service.tokenizer.chat_format
    match name:
        case "include":
            return {*value} <= {LOGPROBS}
        case "effort" | "reasoning_effort":
            return form is not None and "reasoning_effort" in form.variables
        case "store":
            return service.settings.responses is not None
        case "return":
            return True  # of a tool: given to the chat template with the rest of it
        case "name" | "reasoning_content":
            return form is not None and name in form.message_keys
        case _:
            return False
