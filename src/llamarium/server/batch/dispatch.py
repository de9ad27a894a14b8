"""Calls the server's routes in this process, without a socket."""

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from starlette.types import Message, Scope

from llamarium.errors import show_value
from llamarium.server.app import post_paths
from llamarium.server.batch.lines import BatchRequest
from llamarium.server.errors import ApiError, internal_error
from llamarium.server.http.access import http_scope, where
from llamarium.server.http.stream import encode


@dataclass(frozen=True, slots=True)
class RouteReply:
    """A route's reply.

    Attributes:
        status: HTTP status.
        body: JSON in one line of ASCII.
        bug: Type and location of an internal error, or None.
    """

    status: int
    body: str
    bug: str | None = None


class Routes:
    """The POST routes of an application."""

    def __init__(self, app: FastAPI) -> None:
        self._app, self._paths = app, post_paths()

    def check(self, request: BatchRequest) -> None:
        """Raise ApiError for a request that cannot be part of a batch."""
        if request.url not in self._paths:
            message = f"url: {show_value(request.url)} is not a supported endpoint; available: {', '.join(self._paths)}"
            raise ApiError(404, message, code="not_found", param="url")
        if request.body.get("stream") is True:
            message = "body.stream is not supported in a batch; leave it out"
            raise ApiError(400, message, code="unsupported_parameter", param="body.stream")

    async def post(self, request: BatchRequest) -> RouteReply:
        """Return the route's reply; an internal error is a reply with status 500."""
        parts: list[bytes] = []
        status, bodies = 0, [_written(request.body)]

        async def receive() -> Message:
            if not bodies:
                await asyncio.get_running_loop().create_future()  # there is no client that could disconnect
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}

        async def send(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            parts.append(message.get("body", b""))

        try:
            await self._app(_scope_of(request), receive, send)
        except Exception as error:  # noqa: BLE001 - reported without its text, which may contain a prompt
            return RouteReply(500, encode(internal_error().body_at(request.url, None)), where(error))
        return RouteReply(status, _as_ascii(b"".join(parts)))


def _written(body: Mapping[str, Any]) -> bytes:
    """Return a body in UTF-8, as clients send it; in ASCII it could exceed the size limit."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def _scope_of(request: BatchRequest) -> Scope:
    headers = [(b"content-type", b"application/json")]
    state = {"notes": {}, "request_id": None, "began": time.monotonic()}
    return http_scope(request.url, method="POST", query_string=b"", headers=headers, client=None, **state)


def _as_ascii(body: bytes) -> str:
    """Return JSON in ASCII, as some line readers split lines at U+2028."""
    return body.decode() if body.isascii() else encode(json.loads(body))
