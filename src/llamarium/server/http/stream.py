"""Server-sent events, pings while a stream is idle, and detection of disconnected clients."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import ExitStack
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llamarium.server.errors import ApiError, internal_error

T = TypeVar("T")

Write = Callable[[str], Awaitable[None]]
"""Sends complete events to a stream; waits for a slow reader. An empty text is not sent."""

encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
"""Encodes JSON in ASCII, as some line readers split lines at U+2028."""

STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer, or a stream of events.", "content": {"text/event-stream": {}}}
}
"""The streaming and non-streaming response, for the OpenAPI description."""

COMMENT = b": ping\n\n"

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # otherwise nginx buffers events


def event(data: Mapping[str, Any]) -> str:
    """Return a server-sent event, named by the data's `type`."""
    return f"event: {data['type']}\ndata: {encode(data)}\n\n"


class EventStream(Response):
    """A response of server-sent events.

    Args:
        produce: Writes the events; cancelled when the client disconnects.
        failure: Returns the last events if `produce` raises; errors other than `ApiError` are re-raised.
        ping_s: Seconds without an event after which a ping is sent.
        held: Resources to release when the stream ends, however it ends.
        ping: The ping event.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        produce: Callable[[Write], Coroutine[Any, Any, None]],
        failure: Callable[[ApiError], str],
        ping_s: float,
        held: ExitStack,
        ping: bytes = COMMENT,
    ) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._produce, self._failure, self._held = produce, failure, held
        self._ping_s, self._ping = ping_s, ping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        with self._held:
            if not await self._send_all(scope["notes"], receive, send):
                scope["notes"]["error"] = "client_left"

    async def _send_all(self, notes: dict[str, Any], receive: Receive, send: Send) -> bool:
        """Send all events; return False if the client disconnected first."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        written_at = time.monotonic()

        async def write_bytes(events: bytes) -> None:
            nonlocal written_at
            await send({"type": "http.response.body", "body": events, "more_body": True})
            written_at = time.monotonic()

        async def write(events: str) -> None:
            if events:
                await write_bytes(events.encode())

        async def ping() -> None:
            if time.monotonic() - written_at >= self._ping_s:
                await write_bytes(self._ping)

        async def produce_all() -> bool:
            try:
                await self._produce(write)
            except ApiError as error:
                notes["error"] = error.code
                await write(self._failure(error))
            except Exception:
                await write(self._failure(internal_error()))
                raise
            return True

        came_to_its_end = await while_listening(produce_all(), receive, ping, self._ping_s)
        if came_to_its_end:
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        return bool(came_to_its_end)


async def while_listening(
    work: Coroutine[Any, Any, T],
    receive: Receive,
    idle: Callable[[], Awaitable[None]] | None = None,
    idle_s: float = 1e9,
) -> T | None:
    """Return the result of `work`, or cancel it and return None if the client disconnects.

    Args:
        work: The work.
        receive: The request's ASGI `receive`.
        idle: Called every `idle_s` seconds while `work` runs.
        idle_s: Interval in seconds.
    """
    task = asyncio.ensure_future(work)
    listener = asyncio.ensure_future(_leaving(receive, idle, idle_s))
    tasks = (task, listener)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else listener.result()
    finally:
        for pending in tasks:
            pending.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _leaving(receive: Receive, idle: Callable[[], Awaitable[None]] | None, idle_s: float) -> None:
    """Wait until the client disconnects, calling `idle` every `idle_s` seconds."""
    while True:
        try:
            async with asyncio.timeout(idle_s):
                message = await receive()
        except TimeoutError:
            if idle is not None:
                await idle()
            continue
        if message["type"] == "http.disconnect":
            return
