"""Formats a message in Anthropic's format, complete or as a stream of events."""

import secrets
from collections.abc import Sequence
from typing import Any

from llamarium.generation.completion import Piece
from llamarium.server.arguments import members
from llamarium.server.errors import ApiError
from llamarium.server.http.stream import event
from llamarium.server.replying import ReplyFormatter, Usage
from llamarium.tokenizer.tools.deltas import CallArguments, CallBegin, CallEnd, ContentDelta, Delta

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageFormatter(ReplyFormatter):
    """Formats one message; its first event is returned with the first step, as it contains the token counts.

    Args:
        model: The model's name in the message.
        request_id: The request's id, for errors.
    """

    ping = event({"type": "ping"}).encode()

    def __init__(self, model: str, request_id: str | None) -> None:
        self._request_id = request_id
        self._content: list[dict[str, Any]] = []
        self._open: str | None = None  # type of the last block until it ends
        self._parts: list[str] = []  # of that block's text, or of its input as JSON
        self._has_begun = False
        self._message: dict[str, Any] = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def events(self, prompt: int, pieces: Sequence[Piece], usage: Usage) -> str:
        """Return the events of one step."""
        events = "" if self._has_begun else self._start(usage)
        for piece in pieces:
            events += "".join(map(self._delta_events, piece.deltas))
            events += "" if piece.finish_reason is None else self._finish(usage, piece, piece.finish_reason)
        return events

    def failure(self, error: ApiError) -> str:
        """Return the error event."""
        return event(error.anthropic_body(self._request_id))

    def whole(self, usage: Usage) -> dict[str, Any]:
        """Return the complete message."""
        return self._message

    def _finish(self, usage: Usage, last: Piece, finish_reason: str) -> str:
        stopped = last.stop_string is not None and finish_reason == "stop"
        reason = "stop_sequence" if stopped else _STOP_REASONS[finish_reason]
        delta = {"stop_reason": reason, "stop_sequence": last.stop_string if stopped else None}
        closed = self._close()
        self._message |= delta | {"content": self._content, "usage": _counts(usage)}
        last_event = event({"type": "message_delta", "delta": delta, "usage": _counts(usage)})
        return closed + last_event + event({"type": "message_stop"})

    def _start(self, usage: Usage) -> str:
        self._has_begun = True
        return event({"type": "message_start", "message": self._message | {"usage": _counts(usage)}})

    def _delta_events(self, delta: Delta) -> str:
        match delta:
            case ContentDelta(text):
                start = "" if self._open == "text" else self._begin({"type": "text", "text": ""})
                return start + self._add(text, {"type": "text_delta", "text": text})
            case CallBegin(_, call_id, name):
                return self._begin({"type": "tool_use", "id": call_id, "name": name, "input": {}})
            case CallArguments(_, fragment):
                return self._add(fragment, {"type": "input_json_delta", "partial_json": fragment})
            case CallEnd():
                return self._close()

    def _begin(self, block: dict[str, Any]) -> str:
        """Return the events that end the open block and start the next one."""
        closed = self._close()
        self._open = block["type"]
        self._content.append(block)
        return closed + event({"type": "content_block_start", "index": self._index, "content_block": block})

    def _add(self, part: str, delta: dict[str, Any]) -> str:
        self._parts.append(part)
        return event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _close(self) -> str:
        """Return the event that ends the open block, if any."""
        if self._open is None:
            return ""
        joined = "".join(self._parts)
        self._content[-1] |= {"text": joined} if self._open == "text" else {"input": members(joined)}
        self._open, self._parts = None, []
        return event({"type": "content_block_stop", "index": self._index})

    @property
    def _index(self) -> int:
        return len(self._content) - 1


def _counts(usage: Usage) -> dict[str, Any]:
    """Return token counts with Anthropic's names; `input_tokens` excludes cached tokens."""
    counts = usage.counts()
    return {
        "input_tokens": counts.prompt - counts.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counts.cached,
        "output_tokens": counts.generated,
        **usage.prefix,
    }
