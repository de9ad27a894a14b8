"""Connection limits that uvicorn lacks: slow senders, slow readers, large headers, too many connections.

A connection is closed if its headers do not arrive in time, or if the client does not read written data in time. The
size of headers and trailers and the number of pipelined requests are limited.
"""

import asyncio
import re
from types import SimpleNamespace
from typing import cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from llamarium.server.errors import ApiError
from llamarium.server.settings import Settings

MAX_REQUESTS_AHEAD = 8
"""Maximum number of pipelined requests; the connection is closed after them."""

_WHOLE_URL = re.compile(rb"https?://([^/?#]*)", re.IGNORECASE)
_LINGER_S = 1.0  # time for a client to finish sending its body, so that it can read the response
_BAD = ApiError(400, "this is not an HTTP request", code="invalid_http")
_ELSEWHERE = ApiError(400, "the host in the request's URL does not match the Host header", code="invalid_http")
_CODED = ApiError(400, "the only supported transfer coding is chunked, once, in HTTP/1.1", code="invalid_http")
_LARGE = ApiError(431, "the headers or trailers are too large", code="headers_too_large")
_LATE = ApiError(408, "the headers did not arrive in time", code="request_timeout")
_CROWDED = ApiError(503, "there are too many connections; try again later", code="too_many_connections")


class BoundedConnection(HttpToolsProtocol):
    """A client's connection with limits; `connection_class` returns a subclass with a server's settings."""

    settings: Settings

    url: bytes = b""  # of the request being read
    _header_bytes = 0  # received bytes of headers, or of chunk headers and trailers since the last part of the body
    _in_headers, _in_body = True, False
    _is_full = False  # further data is ignored
    _header_timer: asyncio.TimerHandle | None = None
    _reading_timer: asyncio.TimerHandle | None = None
    _body_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Accept a connection, unless there are too many."""
        super().connection_made(transport)
        self._expect_headers()
        if len(self.connections) > self.settings.max_connections:
            self._refuse(_CROWDED)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers."""
        super().connection_lost(exc)
        _cancel(self._header_timer, self._reading_timer, self._body_timer)

    def data_received(self, data: bytes) -> None:
        """Parse received data."""
        if self.transport.is_closing() or self._is_full:
            return
        if self._in_headers or self._in_body:
            self._header_bytes += len(data)
        super().data_received(data)
        if (self._in_headers or self._in_body) and self._header_bytes > self.settings.max_header_bytes:
            self._refuse(_LARGE)
        elif not (self._in_body or (self.cycle and not self.cycle.response_complete)):  # even after blank lines only
            self._expect_headers()

    def on_message_begin(self) -> None:
        """Start reading a request."""
        super().on_message_begin()
        if not self._is_full:
            self._expect_headers()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header; ignore a trailer."""
        if not self._in_body:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start handling a request whose headers are valid, unless too many requests are pipelined."""
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
        if len(self.pipeline) >= MAX_REQUESTS_AHEAD:
            self._is_full = True
            self.pipeline[0][0].keep_alive = False  # index 0 is the last request received
        if self._is_full:
            return
        self._in_headers, self._header_bytes = False, 0
        if sum(len(name) + len(value) for name, value in self.headers) + len(self.url) > self.settings.max_header_bytes:
            self._refuse(_LARGE)
            return
        if error := self._framing_error():
            self._refuse(error)
            return
        self._in_body = True
        super().on_headers_complete()
        # the part of the transport that uvicorn uses for a response, with our own close
        transport = SimpleNamespace(
            write=self.transport.write, is_closing=self.transport.is_closing, close=self.hang_up
        )
        self.cycle.transport = cast(asyncio.Transport, transport)

    def _framing_error(self) -> ApiError | None:
        """Return an error if a proxy could interpret the headers differently (request smuggling), else None."""
        codings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        version = self.parser.get_http_version()  # pyright: ignore[reportOptionalMemberAccess]
        if codings and (codings != [b"chunked"] or version != "1.1"):
            return _CODED
        if self.url.startswith(b"/"):
            return None
        absolute, hosts = _WHOLE_URL.match(self.url), [value for name, value in self.headers if name == b"host"]
        return None if absolute and hosts == [absolute[1]] else _ELSEWHERE

    def on_body(self, body: bytes) -> None:
        """Store a part of a body."""
        if not self._is_full:
            self._header_bytes = 0
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Finish a body."""
        if self._is_full:
            return
        super().on_message_complete()
        self._in_body, self._header_bytes = False, 0
        if self._body_timer is not None:
            self._body_timer.cancel()

    def hang_up(self) -> None:
        """Close the connection after a response, but not before the client has sent its body: it could not read it."""
        if self._in_body:
            self._is_full = True  # on_response_complete closes the connection
        else:
            self.transport.close()

    def on_response_complete(self) -> None:
        """Continue with the next request, waiting up to `_LINGER_S` for the rest of this one's body."""
        super().on_response_complete()
        if self._in_body and not self.transport.is_closing():
            self._body_timer = self.loop.call_later(_LINGER_S, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        """Reject data that is not HTTP."""
        self._refuse(_BAD)

    def pause_writing(self) -> None:
        """Pause for a slow reader; abort the connection after `read_timeout_s`."""
        super().pause_writing()
        _cancel(self._reading_timer)
        self._reading_timer = self.loop.call_later(self.settings.read_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        """Resume writing, as the client has read."""
        super().resume_writing()
        _cancel(self._reading_timer)

    @property
    def _is_answering(self) -> bool:
        return bool(self.cycle) and not self.cycle.response_complete

    def _expect_headers(self) -> None:
        self._in_headers = True
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(self.settings.header_timeout_s, self._refuse, _LATE)

    @property
    def _may_write(self) -> bool:
        """Whether the client would take an error written now as the response to the request being read."""
        if not self._is_answering:
            return True
        return self._in_body and not self.pipeline and not self.cycle.response_started

    def _refuse(self, error: ApiError) -> None:
        """Write an error, unless another response is being written, and close the connection."""
        if self.transport.is_closing() or self._is_full:
            return
        if self._may_write:
            path = self.url.partition(b"?")[0].decode("latin-1")
            body = bytes(error.response(path, None).body)
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status_code] + head + body)
            if self._is_answering:
                self.cycle.disconnected = True  # so that it writes no second response
        self.transport.close()


def connection_class(of: Settings) -> type[BoundedConnection]:
    """Return the connection class of a server with these settings."""

    class Bounded(BoundedConnection):
        settings = of

    return Bounded


def _cancel(*timers: asyncio.TimerHandle | None) -> None:
    for timer in timers:
        if timer is not None:
            timer.cancel()
