"""Formats a response in OpenAI's format, complete or as a stream of numbered events."""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llamarium.generation.completion import Piece
from llamarium.server.errors import ApiError
from llamarium.server.fields import Body
from llamarium.server.http.stream import event
from llamarium.server.openai.logprobs import for_chat
from llamarium.server.openai.responses.requests import ResponseRequest
from llamarium.server.replying import ReplyFormatter, Usage
from llamarium.tokenizer.base import Tokenizer
from llamarium.tokenizer.tools.deltas import CallArguments, CallBegin, CallEnd, ContentDelta

Keep = Callable[[dict[str, Any]], bool]
"""Stores a response; returns whether that succeeded."""


class ResponseFormatter(ReplyFormatter):
    """Formats one response.

    Args:
        body: The request.
        model: The model's name in the response.
        tokenizer: The model's tokenizer.
        keep: Stores the response; None if it is not stored.
    """

    def __init__(self, body: ResponseRequest, model: str, tokenizer: Tokenizer, keep: Keep | None) -> None:
        self._tokenizer, self._keep = tokenizer, keep
        self.stores = keep is not None
        self._number = 0  # of the next event
        self._output: list[dict[str, Any]] = []
        self._open: str | None = None  # type of the last item until it ends
        self._parts: list[str] = []  # of that item's text or arguments
        self._logprobs: list[dict[str, Any]] = []
        self._held: list[dict[str, Any]] = []  # log-probabilities of tokens whose text has not been sent yet
        self._response = _envelope(body, model)

    def begin(self) -> str:
        """Return the events at the start of a response."""
        return self._event("response.created", response=self._response) + self._event(
            "response.in_progress", response=self._response
        )

    def events(self, prompt: int, pieces: Sequence[Piece], usage: Usage) -> str:
        """Return the events of one step; log-probabilities are sent with their tokens' text, but not for tool calls."""
        events = ""
        for piece in pieces:
            self._held += for_chat(self._tokenizer, piece.logprobs)["content"]
            for delta in piece.deltas:
                events += self._text_events(delta.text) if isinstance(delta, ContentDelta) else self._call_events(delta)
            events += "" if piece.finish_reason is None else self._finish(usage, piece.finish_reason)
        return events

    def end(self, usage: Usage) -> str:
        """Store the response if requested, and return its last event."""
        return self._event(f"response.{self._response['status']}", response=self.whole(usage))

    def failure(self, error: ApiError) -> str:
        """Return the last events of a failed stream."""
        complete = self._output if self._open is None else self._output[:-1]
        return failure_events(self._response, complete, self._number, error)

    def whole(self, usage: Usage) -> dict[str, Any]:
        """Store the response if requested, and return it."""
        if self._keep is not None:
            self._response["store"] = self._keep(self._response | {"store": True})
        return self._response

    def _finish(self, usage: Usage, finish_reason: str) -> str:
        is_cut = finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        events = "" if self._output else self._begin_message()
        events += self._text_events("") if self._held and self._open == "message" else ""
        events += self._close(status)
        self._response |= {"status": status, "output": self._output, "usage": _counts(usage)}
        if is_cut:
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self._response["completed_at"] = int(time.time())
        return events

    def _text_events(self, text: str) -> str:
        start = "" if self._open == "message" else self._begin_message()
        self._parts.append(text)
        logprobs, self._held = self._held, []
        self._logprobs += logprobs
        return start + self._part_event("response.output_text.delta", delta=text, logprobs=logprobs)

    def _call_events(self, delta: CallBegin | CallArguments | CallEnd) -> str:
        self._held = []
        match delta:
            case CallBegin(_, call_id, name):
                call = {"id": f"fc_{secrets.token_hex(12)}", "call_id": call_id, "name": name, "arguments": ""}
                return self._begin({"type": "function_call", **call, "status": "in_progress"})
            case CallArguments(_, fragment):
                self._parts.append(fragment)
                return self._item_event("response.function_call_arguments.delta", delta=fragment)
            case CallEnd(_, is_complete):
                return self._close("completed" if is_complete else "incomplete")

    def _begin_message(self) -> str:
        item_id = f"msg_{secrets.token_hex(12)}"
        added = self._begin(
            {"type": "message", "id": item_id, "role": "assistant", "status": "in_progress", "content": []}
        )
        return added + self._part_event("response.content_part.added", part=_part("", []))

    def _begin(self, item: dict[str, Any]) -> str:
        """Return the events that end the open item and start the next one."""
        closed = self._close("completed")
        self._open = item["type"]
        self._output.append(item)
        return closed + self._event("response.output_item.added", output_index=self._index, item=item)

    def _close(self, status: str) -> str:
        """Return the events that end the open item, if any."""
        if self._open is None:
            return ""
        joined, item = "".join(self._parts), self._output[-1]
        if self._open == "message":
            part = _part(joined, self._logprobs)
            done = self._part_event("response.output_text.done", text=joined, logprobs=self._logprobs)
            done += self._part_event("response.content_part.done", part=part)
            item |= {"status": status, "content": [part]}
        else:
            done = self._item_event("response.function_call_arguments.done", name=item["name"], arguments=joined)
            item |= {"status": status, "arguments": joined}
        self._open, self._parts, self._logprobs = None, [], []
        return done + self._event("response.output_item.done", output_index=self._index, item=item)

    def _item_event(self, kind: str, **fields: Any) -> str:
        return self._event(kind, item_id=self._output[-1]["id"], output_index=self._index, **fields)

    def _part_event(self, kind: str, **fields: Any) -> str:
        return self._item_event(kind, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> str:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number - 1, **fields})

    @property
    def _index(self) -> int:
        return len(self._output) - 1


def failure_events(response: Mapping[str, Any], items: Sequence[Any], number: int, error: ApiError) -> str:
    """Return the last events of a failed response.

    Args:
        response: The response without output.
        items: Its complete items.
        number: Number of the next event.
        error: The error.
    """
    cause = {"code": "server_error", "message": error.message}
    failed = {**response, "status": "failed", "error": cause, "output": list(items)}
    cause_in_full = {"code": error.code, "message": error.message, "param": error.param}
    last = event({"type": "error", "sequence_number": number, **cause_in_full})
    return last + event({"type": "response.failed", "sequence_number": number + 1, "response": failed})


def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _envelope(body: ResponseRequest, model: str) -> dict[str, Any]:
    """Return a response without output, which repeats the request's fields."""
    echoed = body.model_dump(
        include={"metadata", "prompt_cache_key", "safety_identifier", "temperature", "top_p", "user"}
    )
    text: dict[str, Any] = {"format": {"type": "text"}}
    if body.text is not None and body.text.format is not None:
        text["format"] = _as_given(body.text.format)
    return {
        "id": f"resp_{secrets.token_hex(12)}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "model": model,
        "output": [],
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": echoed.pop("metadata") or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "background": False,
        "store": False,
        "top_logprobs": body.top_logprobs or 0,
        "text": text,
        "tool_choice": _as_given(body.tool_choice) or "auto",
        "tools": [_as_given(tool) for tool in body.tools or ()],
        "truncation": "disabled",
        "service_tier": "default",
        "usage": None,
        **echoed,
    }


def _as_given(value: Body | str | None) -> Any:
    return value.model_dump(by_alias=True, exclude_none=True) if isinstance(value, Body) else value


def _counts(usage: Usage) -> dict[str, Any]:
    counts = usage.counts()
    return {
        "input_tokens": counts.prompt,
        "input_tokens_details": {"cached_tokens": counts.cached, "cache_write_tokens": 0, **usage.prefix},
        "output_tokens": counts.generated,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts.prompt + counts.generated,
    }
