"""Read a request's body: within its bounds, as strict JSON, before its fields are validated."""

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
"""How deep objects and lists may be nested."""

MAX_VALUES = 2**20
"""Values of a body at most: an empty list takes three bytes to send and sixty to keep."""

BOUNDS: dict[str, Any] = {"max_values": MAX_VALUES, "max_levels": MAX_LEVELS, "portable": True}
"""Of `parse_json`, for everything that clients send."""

MAX_BYTES_AT_ONCE = 2**28
"""Of all bodies that are being received or read."""

_LARGE = 2**14  # bytes: parsed in a thread, so that other requests need not wait


@dataclass(slots=True)
class Bodies:
    """The bytes of all bodies in memory: from their first byte until they are encoded."""

    num_bytes: int = 0


@dataclass(slots=True)
class Held:
    """The bytes of one body in memory."""

    _bodies: Bodies
    num_bytes: int = 0

    def add(self, num_bytes: int, most: int) -> None:
        """Count received bytes; ApiError 413 for more than `most` of the body, 503 for too many of all together."""
        self.num_bytes += num_bytes
        self._bodies.num_bytes += num_bytes
        if self.num_bytes > most:
            raise _too_large(most)
        if self._bodies.num_bytes > MAX_BYTES_AT_ONCE:
            message = "too much request data at once; try again later"
            raise ApiError(503, message, code="overloaded", headers={"retry-after": "1"})

    def close(self) -> None:
        """Count the body no more."""
        self._bodies.num_bytes -= self.num_bytes
        self.num_bytes = 0


class StrictRequest(Request):
    """A request whose body is bounded in size and time, read as strict JSON, and validated by `kind`."""

    def __init__(self, request: Request, held: Held, kind: type[Body]) -> None:
        super().__init__(request.scope, request.receive)
        self._held, self._kind = held, kind

    async def body(self) -> bytes:
        """Read the whole body; ApiError 415 if it is not declared as JSON, 408, 413 and 503 as `read_bounded`."""
        if not hasattr(self, "_body"):
            check_json_type(self.headers.get("content-type", ""), self.headers.get("content-encoding", ""))
            settings = self.app.state.service.settings
            if int(self.headers.get("content-length", "0")) > settings.max_body_bytes:
                raise _too_large(settings.max_body_bytes)  # before it comes
            self._body = await read_bounded(self.stream(), settings, self._held)
        return self._body

    async def json(self) -> Body:
        """Read the body and validate its fields, in place of the framework."""
        body = await self.body()
        self._body = b""  # a stream may live for long
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
    """Read a body within the settings' bounds of time and size, and of all bodies together; ApiError 408, 413, 503."""
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


def _too_large(most: int) -> ApiError:
    message = f"the body exceeds the maximum of {most:,} bytes"
    return ApiError(413, message, code="request_too_large")


class StrictRoute(APIRoute):
    """A route that reads its body by a `StrictRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler of wrapped requests."""
        handler = super().get_route_handler()
        if self.body_field is None:  # of GET
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
    """Refuse a body that is not declared as JSON; ApiError 415."""
    kind, _, parameters = (part.strip().lower() for part in content_type.partition(";"))
    if kind != "application/json" or parameters.replace('"', "").replace(" ", "") not in ("", "charset=utf-8"):
        raise ApiError(415, "expected the content-type application/json", code="unsupported_media_type")
    if content_encoding.strip().lower() not in ("", "identity"):
        message = "content-encoding is not supported; send the body uncompressed"
        raise ApiError(415, message, code="unsupported_media_type")


def read_json(body: bytes) -> Any:
    """Read a body; ApiError 400 if it is not strict JSON within the server's bounds."""
    try:
        return parse_json(body, **BOUNDS)
    except NotJson as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
