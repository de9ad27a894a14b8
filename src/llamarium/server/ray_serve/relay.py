"""Relays a reply from a replica to a client, and ends it if the replica fails."""

import json
from typing import Any

from starlette.types import Receive, Scope, Send

from llamarium.server.errors import ApiError, is_anthropic
from llamarium.server.http.access import where
from llamarium.server.http.stream import COMMENT, event
from llamarium.server.openai.choices import error_event
from llamarium.server.openai.responses.formatter import failure_events
from llamarium.server.ray_serve.forward import IDS, Head

_ITEM = b"event: response.output_item.done\n"


class Relay:
    """Relays one reply."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._is_stream = self._is_over = False
        self._failure = ResponseStreamFailure() if scope["path"] == "/v1/responses" else StreamFailure(scope)

    async def pass_on(self, part: Head | bytes) -> None:
        """Send a part of a replica's reply."""
        if isinstance(part, bytes):
            self._failure.see(part)
            await self._body(part)
            return
        self._is_stream = part.body is None
        headers = [header for header in part.headers if header[0] not in IDS]
        await self._send({"type": "http.response.start", "status": part.status, "headers": headers})
        if part.body is not None:
            await self._body(part.body, is_last=True)

    async def end(self) -> None:
        """End the reply."""
        if self._is_stream:
            await self._body(b"", is_last=True)

    async def refuse(self, refusal: ApiError, error: Exception) -> None:
        """End the reply with an error, as an event if a stream has started."""
        self._scope["notes"]["error"] = where(error) if refusal.status_code == 500 else refusal.code
        if self._is_stream:
            await self._body(self._failure.of(refusal), is_last=True)
        elif not self._is_over:
            response = refusal.response(self._scope["path"], self._scope["request_id"])
            await response(self._scope, self._receive, self._send)

    async def _body(self, body: bytes, *, is_last: bool = False) -> None:
        self._is_over = is_last
        await self._send({"type": "http.response.body", "body": body, "more_body": not is_last})


class StreamFailure:
    """Returns the last events of a failed stream."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope

    def see(self, piece: bytes) -> None:
        """Process events that were sent to the client."""

    def of(self, error: ApiError) -> bytes:
        """Return the error event."""
        if is_anthropic(self._scope["path"]):
            return event(error.anthropic_body(self._scope["request_id"])).encode()
        return error_event(error).encode()


class ResponseStreamFailure(StreamFailure):
    """Returns the last events of a failed response: they are numbered, and the last one contains the response."""

    def __init__(self) -> None:
        self._number = 0  # of the next event
        self._response: dict[str, Any] = {}
        self._items: list[Any] = []

    def see(self, piece: bytes) -> None:
        """Process complete events that were sent to the client."""
        for raw_event in piece.replace(COMMENT, b"").split(b"\n\n")[:-1]:
            if self._number == 0:
                self._response = _data(raw_event)["response"]
            if raw_event.startswith(_ITEM):
                self._items.append(_data(raw_event)["item"])
            self._number += 1

    def of(self, error: ApiError) -> bytes:
        """Return the error event, and the last event with the response's complete items."""
        return failure_events(self._response, self._items, self._number, error).encode()


def _data(raw_event: bytes) -> Any:
    return json.loads(raw_event.partition(b"\ndata: ")[2])
