"""Parses the server-sent events of streamed completions and chat completions.

Source: the HTML standard, section 9.2.6.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from llamarium.errors import escape
from llamarium.load_test.exchange import Failure, ReportedUsage

DONE = b"[DONE]"
_MESSAGE_CHARACTERS = 300


class Events:
    """Splits a byte stream into the data of its events."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of the events that are complete with these bytes; comments and other fields are ignored."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        payloads: list[bytes] = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                payloads.append(b"\n".join(self._data))
                self._data = []
        return payloads


@dataclass(frozen=True, slots=True)
class Chunk:
    """An event of a stream.

    Attributes:
        has_piece: Whether it has text, reasoning, a tool call or token ids.
        is_last: Whether it has a finish reason.
        usage: The server's token counts, or None.
    """

    has_piece: bool
    is_last: bool
    usage: ReportedUsage | None


def parse_chunk(data: bytes) -> Chunk:
    """Parse an event's data; Failure if it is not JSON or contains an error."""
    fields = _parsed(data)
    if fields is None:
        raise Failure("not JSON", f"an event is {shown(data)}")
    if fields.get("error"):
        raise Failure("stream error", error_message(data))
    choices = fields.get("choices")
    choice = (_object(cast(list[object], choices)[0]) if isinstance(choices, list) and choices else None) or {}
    delta = _object(choice.get("delta")) or {}
    pieces = [choice.get(key) for key in ("text", "token_ids")]
    pieces += [delta.get(key) for key in ("content", "reasoning_content", "reasoning", "tool_calls")]
    return Chunk(any(pieces), bool(choice.get("finish_reason")), _usage(_object(fields.get("usage"))))


def listed_models(body: bytes) -> list[str]:
    """Return the model names in the body of `/v1/models`; an invalid body has none."""
    models = (_parsed(body) or {}).get("data")
    items = cast(list[object], models) if isinstance(models, list) else []
    return [name for model in items if isinstance(name := (_object(model) or {}).get("id"), str)]


def error_message(body: bytes) -> str:
    """Return the message in an error's body: OpenAI's `error.message`, FastAPI's `detail`, or the body's beginning."""
    fields = _parsed(body) or {}
    error = fields.get("error", fields.get("detail"))
    message = (_object(error) or {}).get("message", error)
    return escape(message, _MESSAGE_CHARACTERS) if isinstance(message, str) and message else shown(body)


def shown(data: bytes) -> str:
    """Return bytes from a server as escaped and shortened text."""
    return escape(" ".join(data.decode("utf-8", "replace").split()), _MESSAGE_CHARACTERS) or "(nothing)"


def _parsed(data: bytes) -> Mapping[str, Any] | None:
    try:
        return _object(json.loads(data))
    except (ValueError, RecursionError):
        return None


def _object(value: object) -> Mapping[str, Any] | None:
    return cast(Mapping[str, Any], value) if isinstance(value, dict) else None


def _usage(fields: Mapping[str, Any] | None) -> ReportedUsage | None:
    if fields is None:
        return None
    prompt, completion = fields.get("prompt_tokens"), fields.get("completion_tokens")
    cached = (_object(fields.get("prompt_tokens_details")) or {}).get("cached_tokens")
    if type(prompt) is not int or type(completion) is not int:
        return None
    return ReportedUsage(prompt, completion, cached if type(cached) is int else None)
