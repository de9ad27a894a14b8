"""The outermost layer: a request's id, its line in the log, and the handler of unexpected errors."""

import re
import secrets
import time
import traceback
from collections.abc import MutableMapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llamarium.server.errors import internal_error, is_anthropic
from llamarium.server.http.log import Log

_TRACE = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Access:
    """Gives each request an id, and logs a line about it; a trace that it belongs to is logged and returned."""

    def __init__(self, app: ASGIApp, log: Log) -> None:
        self._app, self._log = app, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            return
        scope["began"], status = time.monotonic(), 0
        scope["request_id"] = request_id = _request_id(scope)
        names = (b"x-request-id", b"request-id") if is_anthropic(scope["path"]) else (b"x-request-id",)
        scope["notes"] = notes = {}
        own = [(name, request_id.encode()) for name in names]
        if trace := _trace(scope):
            own.append((b"traceparent", trace.encode()))

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *own]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:  # noqa: BLE001 - logged without its text, which may hold a client's
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
    given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"").decode("latin-1")
    return given if _SANE_ID.fullmatch(given) else new_request_id()


def _trace(scope: MutableMapping[str, Any]) -> str:
    """Return a request's `traceparent`, if it is one: version, trace, parent and flags, none of them all zeros.

    Source: W3C Trace Context, https://www.w3.org/TR/trace-context/#traceparent-header.
    """
    given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"traceparent"]
    found = _TRACE.fullmatch(given[0]) if len(given) == 1 else None
    is_valid = found is not None and found[1] != "ff" and found[2].strip("0") and found[3].strip("0")
    return given[0] if is_valid else ""


def http_scope(path: str, **of_request: Any) -> Scope:
    """Return the ASGI scope of a request that did not come over a socket."""
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
    """Return a new id."""
    return f"req-{secrets.token_hex(12)}"


def where(error: Exception) -> str:
    """Return an error's type and where it was raised, without its text and without paths."""
    frames = traceback.extract_tb(error.__traceback__)
    place = frames[-1] if frames else None
    return type(error).__name__ if place is None else f"{type(error).__name__} in {place.name}, line {place.lineno}"
