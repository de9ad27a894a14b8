"""Reads request bodies within limits of size and time, as strict JSON, and validates them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect

from llamarium.server.errors import ApiError
from llamarium.server.fields import Body, validated
from llamarium.server.hints import HEADER, HINT_HEADERS, no_effect_of, note_hints
from llamarium.server.settings import Settings
from llamarium.strict_json import NotJson, parse_json

MAX_LEVELS = 64
"""Maximum nesting depth of objects and lists."""

MAX_VALUES = 2**20
"""Maximum number of JSON values in a body: an empty list takes 3 bytes in the body, but 60 in memory."""

BOUNDS: dict[str, Any] = {"max_values": MAX_VALUES, "max_levels": MAX_LEVELS, "portable": True}
"""Arguments of `parse_json` for all JSON from clients."""

MAX_BYTES_AT_ONCE = 2**28
"""Maximum total size of all bodies that are being received or read."""

_LARGE = 2**14  # bytes; larger bodies are parsed in a thread, so that the event loop is not blocked


@dataclass(slots=True)
class Bodies:
    """The total size of all bodies in memory."""

    num_bytes: int = 0


@dataclass(slots=True)
class Held:
    """The size of one body in memory, counted in the total."""

    _bodies: Bodies
    num_bytes: int = 0

    def add(self, num_bytes: int, limit: int) -> None:
        """Count received bytes.

        Args:
            num_bytes: Bytes received.
            limit: Maximum size of this body.

        Raises:
            ApiError: 413 if this body is too large, 503 if all bodies together are.
        """
        self.num_bytes += num_bytes
        self._bodies.num_bytes += num_bytes
        if self.num_bytes > limit:
            raise _too_large(limit)
        if self._bodies.num_bytes > MAX_BYTES_AT_ONCE:
            message = "too much request data at once; try again later"
            raise ApiError(503, message, code="overloaded", headers={"retry-after": "1"})

    def close(self) -> None:
        """Remove the body from the total."""
        self._bodies.num_bytes -= self.num_bytes
        self.num_bytes = 0


class StrictRequest(Request):
    """A request whose body is limited in size and time, parsed as strict JSON, and validated as `kind`."""

    def __init__(self, request: Request, held: Held, kind: type[Body]) -> None:
        super().__init__(request.scope, request.receive)
        self._held, self._kind = held, kind

    async def body(self) -> bytes:
        """Read the whole body.

        Raises:
            ApiError: 415 if the body is not declared as JSON; 408, 413 and 503 as `read_bounded`.
        """
        if not hasattr(self, "_body"):
            check_json_type(self.headers.get("content-type", ""), self.headers.get("content-encoding", ""))
            settings = self.app.state.service.settings
            if int(self.headers.get("content-length", "0")) > settings.max_body_bytes:
                raise _too_large(settings.max_body_bytes)  # before it arrives
            self._body = await read_bounded(self.stream(), settings, self._held)
        return self._body

    async def json(self) -> Body:
        """Read the body and validate its fields, instead of the framework."""
        body = await self.body()
        self._body = b""  # frees memory, as a stream may run for a long time
        return await asyncio.to_thread(self._read, body) if len(body) > _LARGE else self._read(body)

    def _read(self, body: bytes) -> Body:
        value = read_json(body)
        service = self.app.state.service
        if service.loaded is not None:
            self._kind.check_length(value, service.max_tokens)
        doubtful = list[type[Body]]()
        validated_body = validated(self._kind, value, doubtful)
        if doubtful or any(name in HINT_HEADERS for name, _ in self.scope["headers"]):
            note_hints(validated_body, self.scope, service)
        return validated_body


async def read_bounded(parts: AsyncIterator[bytes], settings: Settings, held: Held) -> bytes:
    """Read a body within the settings' limits.

    Raises:
        ApiError: 408 if it does not arrive in time, 413 if it is too large, 503 if all bodies together are.
    """
    read: list[bytes] = []
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            async for part in parts:
                held.add(len(part), settings.max_body_bytes)
                read.append(part)
    except TimeoutError:
        message = f"the body did not arrive within {settings.body_timeout_s:g} s"
        raise ApiError(408, message, code="request_timeout") from None
    return b"".join(read)


def _too_large(limit: int) -> ApiError:
    message = f"the body exceeds the maximum of {limit:,} bytes"
    return ApiError(413, message, code="request_too_large")


class StrictRoute(APIRoute):
    """A route that reads bodies with `StrictRequest` and reports fields without effect."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return a handler that wraps requests with a body in `StrictRequest`."""
        handler = super().get_route_handler()
        if self.body_field is None:  # e.g. GET
            return handler
        kind: type[Body] = self.body_field.field_info.annotation  # pyright: ignore[reportAssignmentType]

        async def strict(request: Request) -> Response:
            held = Held(request.app.state.bodies)
            try:
                response = await handler(StrictRequest(request, held, kind))
            except ClientDisconnect:
                return Response(status_code=499)
            finally:
                held.close()
                names = str(no_effect_of(request.scope)) if "no_effect" in request.scope else ""
                if names:
                    request.scope["notes"]["no_effect"] = names
            if names:
                response.headers[HEADER] = names
            return response

        return strict


def check_json_type(content_type: str, content_encoding: str) -> None:
    """Validate that a body is declared as uncompressed JSON; otherwise raise ApiError 415."""
    kind, _, parameters = (part.strip().lower() for part in content_type.partition(";"))
    if kind != "application/json" or parameters.replace('"', "").replace(" ", "") not in ("", "charset=utf-8"):
        raise ApiError(415, "expected the content-type application/json", code="unsupported_media_type")
    if content_encoding.strip().lower() not in ("", "identity"):
        message = "content-encoding is not supported; send the body uncompressed"
        raise ApiError(415, message, code="unsupported_media_type")


def read_json(body: bytes) -> Any:
    """Parse a body; ApiError 400 if it is not strict JSON within `BOUNDS`."""
    try:
        return parse_json(body, **BOUNDS)
    except NotJson as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
