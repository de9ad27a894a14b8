"""Bounds of connections that uvicorn lacks: slow senders, slow readers, large headers, too many at once.

A connection is closed if its headers are not received in time, or if written data is not read in time. Headers,
trailers and pipelined requests are counted.
"""

import asyncio
import re
from types import SimpleNamespace
from typing import cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from llamarium.server.errors import ApiError
from llamarium.server.settings import Settings

MAX_REQUESTS_AHEAD = 8
"""Pipelined requests; after them the connection is closed."""

_WHOLE_URL = re.compile(rb"https?://([^/?#]*)", re.IGNORECASE)
_LINGER_S = 1.0  # for a client to end its body, or to read the error
_BAD = ApiError(400, "this is not an HTTP request", code="invalid_http")
_ELSEWHERE = ApiError(400, "the host in the request's URL does not match the Host header", code="invalid_http")
_CODED = ApiError(400, "the only supported transfer coding is chunked, once, in HTTP/1.1", code="invalid_http")
_LARGE = ApiError(431, "the headers or trailers are too large", code="headers_too_large")
_LATE = ApiError(408, "the headers did not arrive in time", code="request_timeout")
_CROWDED = ApiError(503, "there are too many connections; try again later", code="too_many_connections")


class BoundedConnection(HttpToolsProtocol):
    """A client's connection, within the settings of a subclass; see `connection_class`."""

    settings: Settings

    url: bytes = b""  # of the request that is being read
    _header_bytes = 0  # of headers, or of chunk headers and trailers since the last part of a body
    _in_headers, _in_body = True, False
    _is_full = False  # further data is ignored
    _header_timer: asyncio.TimerHandle | None = None
    _reading_timer: asyncio.TimerHandle | None = None
    _body_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Begin a connection, unless there are too many."""
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
        elif not (self._in_body or (self.cycle and not self.cycle.response_complete)):  # also after blank lines alone
            self._expect_headers()

    def on_message_begin(self) -> None:
        """Begin to read a request."""
        super().on_message_begin()
        if not self._is_full:
            self._expect_headers()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header, and ignore a trailer."""
        if not self._in_body:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin to answer, unless too many requests are pipelined."""
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
        if len(self.pipeline) >= MAX_REQUESTS_AHEAD:
            self._is_full = True
            self.pipeline[0][0].keep_alive = False  # the last one received
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
        # what uvicorn does with the transport for an answer
        own = SimpleNamespace(write=self.transport.write, is_closing=self.transport.is_closing, close=self.hang_up)
        self.cycle.transport = cast(asyncio.Transport, own)

    def _framing_error(self) -> ApiError | None:
        """Return the refusal of headers that a proxy may read in another way than this server, if they are such."""
        codings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        version = self.parser.get_http_version()  # pyright: ignore[reportOptionalMemberAccess]
        if codings and (codings != [b"chunked"] or version != "1.1"):
            return _CODED
        if self.url.startswith(b"/"):
            return None
        whole, hosts = _WHOLE_URL.match(self.url), [value for name, value in self.headers if name == b"host"]
        return None if whole and hosts == [whole[1]] else _ELSEWHERE

    def on_body(self, body: bytes) -> None:
        """Keep a part of a body."""
        if not self._is_full:
            self._header_bytes = 0
            super().on_body(body)

    def on_message_complete(self) -> None:
        """End a body."""
        if self._is_full:
            return
        super().on_message_complete()
        self._in_body, self._header_bytes = False, 0
        if self._body_timer is not None:
            self._body_timer.cancel()

    def hang_up(self) -> None:
        """Close after the answer; a client that is still sending its body could not read it otherwise."""
        if self._in_body:
            self._is_full = True  # on_response_complete closes
        else:
            self.transport.close()

    def on_response_complete(self) -> None:
        """Go on with the next request, after at most `_LINGER_S` for the rest of this one's body."""
        super().on_response_complete()
        if self._in_body and not self.transport.is_closing():
            self._body_timer = self.loop.call_later(_LINGER_S, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        """Refuse data that is not HTTP."""
        self._refuse(_BAD)

    def pause_writing(self) -> None:
        """Wait for a slow reader, for `read_timeout_s` at most."""
        super().pause_writing()
        _cancel(self._reading_timer)
        self._reading_timer = self.loop.call_later(self.settings.read_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        """Go on, since the reader has."""
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
        """Whether an error written now would answer the request that is being read."""
        if not self._is_answering:
            return True
        return self._in_body and not self.pipeline and not self.cycle.response_started

    def _refuse(self, error: ApiError) -> None:
        """Write an error, unless an answer is being written, and close."""
        if self.transport.is_closing() or self._is_full:
            return
        if self._may_write:
            path = self.url.partition(b"?")[0].decode("latin-1")
            body = bytes(error.response(path, None).body)
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status_code] + head + body)
            if self._is_answering:
                self.cycle.disconnected = True  # so that it writes no further answer
        self.transport.close()


def connection_class(of: Settings) -> type[BoundedConnection]:
    """Return the class of a server's connections."""

    class Bounded(BoundedConnection):
        settings = of

    return Bounded


def _cancel(*timers: asyncio.TimerHandle | None) -> None:
    for timer in timers:
        if timer is not None:
            timer.cancel()
