"""What a front and a replica tell each other."""

from dataclasses import dataclass
from typing import Any

from starlette.types import Scope

_TOLD = ("method", "path", "query_string", "client", "http_version")

IDS = (b"x-request-id", b"request-id")
"""Headers that tell a request's id; a front's, which its replica is told."""


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A request on its way to a replica.

    Attributes:
        scope: What of its ASGI scope the routes look at.
        body: The whole of it.
        conversation: What decides which replica is asked; None is any.
        full: Names of replicas that have refused it, as they had no place.
    """

    scope: dict[str, Any]
    body: bytes = b""
    conversation: str | None = None
    full: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Head:
    """An answer, or the beginning of a stream.

    Attributes:
        status: Its own.
        headers: In lower case.
        body: The whole of it; None if it comes piece by piece.
        replica: The name of who answers.
    """

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes | None
    replica: str


def told_of(scope: Scope) -> dict[str, Any]:
    """Return what a replica is told of a request."""
    headers = [one for one in scope["headers"] if one[0] not in IDS]
    named = (IDS[0], scope["request_id"].encode())
    return {name: scope[name] for name in _TOLD if name in scope} | {"headers": [*headers, named]}


def path_of(scope: Scope) -> str:
    """Return a request's path within the application, without the prefix that brought it there."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "").rstrip("/")) or "/"


def scope_of(asked: Forwarded) -> Scope:
    """Return the ASGI scope of a request, in a replica."""
    path: str = asked.scope["path"]
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "scheme": "http",
        "root_path": "",
        "raw_path": path.encode(),
        "server": None,
        **asked.scope,
    }
