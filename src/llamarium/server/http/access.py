"""Middleware around the routes, and the log on stderr, with a line per request and per server event.

`Access`, the outermost layer, assigns request ids, logs requests and handles unexpected errors. `Guard` checks host
names, origins and API keys.

Log lines contain no API keys, no text of prompts or answers, and no local paths. Values from clients and names set by
the operator are escaped, so that log lines cannot be forged.
"""

import hashlib
import hmac
import json
import os
import re
import secrets
import shutil
import sys
import textwrap
import time
import traceback
from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llamarium.errors import escape
from llamarium.server.errors import ApiError, internal_error, is_anthropic
from llamarium.server.hosts import is_address, is_everywhere, own_names
from llamarium.server.settings import Settings

_CLEAR_LINE = "\r\x1b[K"
_TRACE = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{0,5}))?")

OPEN_PATHS = frozenset({"/health"})
"""Paths that need no API key."""

_KEY_HEADERS = (b"authorization", b"x-api-key")


class Log:
    """Writes log lines to stderr, with a status line below them on a terminal.

    Args:
        form: Format of the lines.

    Attributes:
        shows_status: Whether stderr is a terminal that can show a status line.
    """

    def __init__(self, form: Literal["text", "json"]) -> None:
        self._form = form
        self._status = ""
        self.shows_status = form == "text" and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"

    def event(self, text: str, **fields: Any) -> None:
        """Log a server event."""
        self._write({"event": text} | fields, text, fields, limit=2000)

    def request(self, fields: dict[str, Any]) -> None:
        """Log the end of a request."""
        escaped = {name: escape(value, 200) if isinstance(value, str) else value for name, value in fields.items()}
        head = f"{escaped.pop('client')} {escaped.pop('method')} {escaped.pop('path')} {escaped.pop('status')}"
        self._write({"event": "request"} | fields, head, escaped)

    def status(self, text: str) -> None:
        """Replace the status line; an empty text removes it."""
        if text != self._status:
            _write_all(_CLEAR_LINE + text)
            self._status = text

    def _write(self, fields: dict[str, Any], head: str, escaped: dict[str, Any], limit: int | None = None) -> None:
        """Write a line; with `limit`, the text is escaped and shortened; without, `escaped` must be escaped."""
        text = " ".join([head, *(f"{name}={value}" for name, value in escaped.items() if value is not None)])
        text = text if limit is None else escape(text, limit)
        now = time.time()
        day, clock = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(now)).split()
        stamp = f"{day}T{clock}.{int(now % 1 * 1000):03d}Z"
        line = f"{stamp} {text}" if self._form == "text" else json.dumps({"time": stamp} | fields)
        if self.shows_status:  # on a terminal: no date, and lines wrap between words, so that addresses stay whole
            line = textwrap.fill(
                f"{clock} {text}", max(40, shutil.get_terminal_size().columns - 1),
                subsequent_indent=" " * len(f"{clock} "), break_long_words=False, break_on_hyphens=False,
            )  # fmt: skip
        _write_all(f"{_CLEAR_LINE}{line}\n{self._status}" if self._status else f"{line}\n")


def _write_all(text: str) -> None:
    """Write to stderr, ignoring errors, so that the server keeps running if it is closed or its disk is full."""
    with suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()


class Access:
    """Assigns an id to each request and logs it; a valid `traceparent` is logged and returned to the client."""

    def __init__(self, app: ASGIApp, log: Log) -> None:
        self._app, self._log = app, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            return
        scope["began"], status = time.monotonic(), 0
        scope["request_id"] = request_id = _request_id(scope)
        names = (b"x-request-id", b"request-id") if is_anthropic(scope["path"]) else (b"x-request-id",)
        scope["notes"] = notes = {}
        own_headers = [(name, request_id.encode()) for name in names]
        traces = [value.decode("latin-1") for name, value in scope["headers"] if name == b"traceparent"]
        if trace := _trace(traces) if traces else "":
            own_headers.append((b"traceparent", trace.encode()))

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *own_headers]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:  # noqa: BLE001 - logged without its text, which may contain client data
            notes["error"] = where(error)
            if status == 0:
                await internal_error().response(scope["path"], request_id)(scope, receive, send_with_id)
        finally:
            self._log.request(
                {
                    "client": (scope.get("client") or ("-",))[0],
                    "method": scope["method"],
                    "path": scope["path"],
                    "status": status,
                    "seconds": round(time.monotonic() - scope["began"], 3),
                    "id": request_id,
                    **({"traceparent": trace} if trace else {}),
                    **notes,
                }
            )


def _request_id(scope: MutableMapping[str, Any]) -> str:
    sent_id = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"").decode("latin-1")
    return sent_id if _SANE_ID.fullmatch(sent_id) else new_request_id()


def _trace(headers: Sequence[str]) -> str:
    """Return a request's `traceparent` header if there is exactly one and it is valid, else "".

    Source: W3C Trace Context, https://www.w3.org/TR/trace-context/#traceparent-header.
    """
    match = _TRACE.fullmatch(headers[0]) if len(headers) == 1 else None
    is_valid = match is not None and match[1] != "ff" and match[2].strip("0") and match[3].strip("0")
    return headers[0] if is_valid else ""


def http_scope(path: str, **of_request: Any) -> Scope:
    """Return the ASGI scope of a request that did not arrive over a socket."""
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "server": None,
        **of_request,
    }


def new_request_id() -> str:
    """Return a new request id."""
    return f"req-{secrets.token_hex(12)}"


def where(error: Exception) -> str:
    """Return an error's type and the function and line where it was raised, without its text and without paths."""
    frames = traceback.extract_tb(error.__traceback__)
    place = frames[-1] if frames else None
    return type(error).__name__ if place is None else f"{type(error).__name__} in {place.name}, line {place.lineno}"


class Guard:
    """Rejects requests with a wrong host name, origin or API key; `open_paths` and `OPEN_PATHS` need no key."""

    def __init__(self, app: ASGIApp, settings: Settings, open_paths: frozenset[str] = frozenset()) -> None:
        self._app, self._settings, self._open_paths = app, settings, OPEN_PATHS | open_paths
        self._keys = [hashlib.sha256(key.encode()).digest() for key in settings.api_keys]
        self._names = own_names(settings.host, settings.allowed_hosts)
        self._any_address = settings.uds is None and is_everywhere(settings.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request to the application, or reject it."""
        headers = [(name, value.decode("latin-1")) for name, value in scope["headers"]]
        hosts = [value for name, value in headers if name == b"host"]
        try:
            self._check_host(hosts)
            for name, value in headers:
                if name == b"origin":
                    self._check_origin(value, hosts)
            if self._keys and scope["path"] not in self._open_paths and scope["method"] != "OPTIONS":
                self._check_key([(name, value) for name, value in headers if name in _KEY_HEADERS])
        except ApiError as error:
            await error.response(scope["path"], scope["request_id"])(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check_host(self, hosts: list[str]) -> None:
        """Reject unknown host names, as a web page's host name can resolve to this server (DNS rebinding)."""
        name = host_name(hosts[0]) if len(hosts) == 1 else ""
        if not name:
            message = "expected one Host header: a name or an address, with an optional port"
            raise ApiError(400, message, code="invalid_http")
        if self._settings.uds is not None or name in self._names or (self._any_address and is_address(name)):
            return
        message = "the Host header does not name this server; start it with --allowed-host to allow it"
        raise ApiError(403, message, code="host_not_allowed")

    def _check_origin(self, origin: str, hosts: list[str]) -> None:
        """Reject web pages from origins other than the server itself and the allowed ones."""
        allowed = self._settings.cors_origins
        own_origins = {f"{scheme}://{host}" for scheme in ("http", "https") for host in hosts}
        if origin in own_origins or origin in allowed or "*" in allowed:
            return
        message = "requests from this origin are not allowed; start the server with --cors-origin to allow them"
        raise ApiError(403, message, code="origin_not_allowed")

    def _check_key(self, keys: list[tuple[bytes, str]]) -> None:
        """Reject a missing or invalid key. Every key header must be valid, as a proxy may check only one of them."""
        if len(dict(keys)) < len(keys):
            raise ApiError(400, "the API key header is repeated; send it once", code="invalid_http")
        if keys and all(self._is_key(value) for _, value in keys):
            return
        message = "missing or invalid API key; send exactly one, in the header Authorization: Bearer KEY"
        raise ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})

    def _is_key(self, value: str) -> bool:
        digest = hashlib.sha256(key_in(value).encode("latin-1")).digest()
        matches = [hmac.compare_digest(digest, key_digest) for key_digest in self._keys]  # constant time
        return any(matches)


def host_name(header: str) -> str:
    """Return the host name in a Host header, without port and brackets, or "" if the header is invalid."""
    match = _HOST.fullmatch(header)
    if match is None or int(match[2] or 0) > 65535:
        return ""
    return match[1].strip("[]").lower().removesuffix(".")


def key_in(value: str) -> str:
    """Return the API key in a header's value, with or without the scheme `Bearer`."""
    scheme, _, rest = value.partition(" ")
    return rest.strip() if scheme.lower() == "bearer" else value


def owner_of(request: Request) -> str:
    """Return a request's API key, which owns what is stored for the request; "" on a server without keys."""
    header = request.headers.get("authorization") or request.headers.get("x-api-key") or ""
    return key_in(header) if request.app.state.service.settings.api_keys else ""
