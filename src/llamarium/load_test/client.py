"""A client of an OpenAI-compatible server: measures requests, finds the model's name, and waits for readiness.

A piece's arrival time is when its bytes were read from the socket, before parsing. Proxies are not used.
"""

import asyncio
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from llamarium.errors import InputError, ServerError, counted, escape
from llamarium.load_test.chunks import DONE, Events, error_message, listed_models, parse_chunk, shown
from llamarium.load_test.connections import BrokenAnswer, Connections, Response
from llamarium.load_test.exchange import Exchange, Failure
from llamarium.load_test.workload import LoadRequest

_POLL_S = 0.2
_ASK_S = 10.0  # timeout of requests without inference
_ERROR_BYTES = 65536  # maximum size kept of an error's body


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server and the common parameters of requests to it.

    Attributes:
        url: Address, as returned by `base_url`.
        model: Model name in requests.
        api_key: API key, or None.
        timeout_s: Maximum duration of a request, in seconds.
        extra: Further fields of each request's body; None removes a field.
    """

    url: str
    model: str = ""
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 600.0
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])


def base_url(text: str) -> str:
    """Return a server's address without a trailing `/v1` or slash; InputError if it is not an HTTP address."""
    try:
        parts, port = urlsplit(text), urlsplit(text).port
        (parts.hostname or "").encode("idna")  # fails here instead of on lookup
    except ValueError:
        parts, port = urlsplit(""), None
    is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0
    if not is_address or "@" in parts.netloc or parts.query or parts.fragment or re.search(r"[^!-~]", text):
        raise InputError(
            f"--url is {escape(text.rpartition('@')[2])}; expected an address such as http://127.0.0.1:8080"
        )
    return text.rstrip("/").removesuffix("/v1").rstrip("/")


class Client:
    """A client of one server, with a connection per concurrent request; close it after use."""

    def __init__(self, target: Target) -> None:
        self.target = target
        headers = {"Content-Type": "application/json", "User-Agent": "llamarium"}
        if target.api_key:
            if not (target.api_key.isascii() and target.api_key.isprintable()):
                raise InputError("the API key has characters that are not allowed in an HTTP header, such as a newline")
            headers["Authorization"] = f"Bearer {target.api_key}"
        self._connections = Connections(target.url, headers)

    def close(self) -> None:
        """Close the connections."""
        self._connections.close()

    async def send(self, request: LoadRequest, due: float | None = None) -> Exchange:
        """Send a request and return its measurements, including the failure, if any.

        Args:
            request: The request.
            due: When the request was due (`time.perf_counter`), from which latencies count; None is now.
        """
        exchange = Exchange(request, time.perf_counter() if due is None else due)
        await self.carry_out(exchange)
        return exchange

    async def carry_out(self, exchange: Exchange) -> None:
        """Run an exchange as `send` does; it can be read while it runs."""
        try:
            async with asyncio.timeout(self.target.timeout_s):
                await self._exchange(exchange)
        except TimeoutError:
            exchange.failure = Failure("timeout", f"not complete within {self.target.timeout_s:g} s")
        except Failure as failure:
            exchange.failure = Failure(failure.kind, self._without_key(failure.message))
        if exchange.failure is not None:
            exchange.end = time.perf_counter()

    async def _exchange(self, exchange: Exchange) -> None:
        path = "/v1/chat/completions" if exchange.request.is_chat else "/v1/completions"
        answer = _Answer(exchange)
        try:
            response = await self._connections.send("POST", path, self._body(exchange.request), answer.receive)
        except BrokenAnswer as error:
            raise Failure("broken stream", escape(error)) from None
        except OSError as error:
            raise Failure("connection", escape(error)) from None
        answer.check(response)

    def _body(self, request: LoadRequest) -> bytes:
        fields = {
            "model": self.target.model,
            "messages" if request.is_chat else "prompt": request.prompt,
            "max_tokens": request.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.target.extra,
        }
        return json.dumps({name: value for name, value in fields.items() if value is not None}).encode()

    async def model(self) -> str:
        """Return the name of the server's only model; ServerError if there is not exactly one."""
        status, body = await self._get("/v1/models")
        if status != 200:
            raise ServerError(f"{self.target.url}/v1/models: {self._described(status, body)}; set --model")
        names = listed_models(body)
        if len(names) != 1:
            listed = f" ({escape(', '.join(names))})" if names else ""
            raise ServerError(
                f"{self.target.url} lists {counted(len(names), 'model')}{listed}; choose one with --model"
            )
        return names[0]

    async def ready(self, wait_s: float) -> None:
        """Wait until the server is ready according to `/health`, or `/v1/models` if that is missing.

        Raises:
            ServerError: If it is not ready after `wait_s` seconds.
        """
        end = time.perf_counter() + wait_s
        while True:
            status, body = await self._get("/health")
            if status in (404, 405):
                status, body = await self._get("/v1/models")
            if status == 200:
                return
            if time.perf_counter() + _POLL_S > end:
                raise ServerError(f"{self.target.url} is not ready after {wait_s:g} s: {self._described(status, body)}")
            await asyncio.sleep(_POLL_S)

    async def _get(self, path: str) -> tuple[int, bytes]:
        parts: list[bytes] = []

        def receive(response: Response, now: float, body: bytes) -> None:
            parts.append(body)

        try:
            async with asyncio.timeout(_ASK_S):
                response = await self._connections.send("GET", path, b"", receive)
        except TimeoutError:
            return 0, f"no answer within {_ASK_S:g} s".encode()
        except OSError as error:
            return 0, str(error).encode()
        return response.status, b"".join(parts)

    def _described(self, status: int, body: bytes) -> str:
        return f"http {status}: {self._without_key(error_message(body))}" if status else shown(body)

    def _without_key(self, message: str) -> str:
        return message.replace(self.target.api_key, "***") if self.target.api_key else message


class _Answer:
    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._events = Events()
        self._other = b""  # the body, if it is not a stream
        self._is_whole = False

    def receive(self, response: Response, now: float, body: bytes) -> None:
        """Process a part of the body, and record the arrival times of its pieces."""
        if not _is_stream(response):
            self._other += body[: _ERROR_BYTES - len(self._other)]
            return
        for event in self._events.feed(body):
            self._exchange.end = now
            if event == DONE:
                self._is_whole = True
                continue
            chunk = parse_chunk(event)
            if chunk.has_piece:
                self._exchange.arrivals.append(now)
            self._is_whole |= chunk.is_last
            self._exchange.usage = chunk.usage or self._exchange.usage

    def check(self, response: Response) -> None:
        """Raise Failure unless the answer is complete."""
        if response.status != 200:
            raise Failure(f"http {response.status}", error_message(self._other))
        if not _is_stream(response):
            kind = response.headers.get("content-type", "no content type")
            raise Failure("no stream", f"{escape(kind)}: {shown(self._other)}")
        num_pieces = len(self._exchange.arrivals)
        if not self._is_whole:
            raise Failure(
                "broken stream", f"it ended after {counted(num_pieces, 'piece')}, without a finish_reason or [DONE]"
            )
        if not num_pieces:
            raise Failure("empty answer", "the answer is empty")


def _is_stream(response: Response) -> bool:
    return response.status == 200 and "text/event-stream" in response.headers.get("content-type", "")
