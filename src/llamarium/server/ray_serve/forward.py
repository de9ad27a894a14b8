"""The messages between fronts and replicas."""

from dataclasses import dataclass
from typing import Any

from starlette.types import Scope

_FORWARDED = ("method", "path", "query_string", "client", "http_version")

IDS = (b"x-request-id", b"request-id")
"""Headers with a request's id, which the front chooses."""


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A request on its way to a replica, with its conversation's name, and the replicas that had no place for it."""

    scope: dict[str, Any]
    body: bytes = b""
    conversation: str | None = None
    full: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Head:
    """A reply's status, headers in lower case, and whole body, or None for a stream; with the name of its replica."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes | None
    replica: str


def forwarded_scope(scope: Scope) -> dict[str, Any]:
    """Return the parts of a request's scope that are forwarded."""
    headers = [one for one in scope["headers"] if one[0] not in IDS]
    named = (IDS[0], scope["request_id"].encode())
    return {name: scope[name] for name in _FORWARDED if name in scope} | {"headers": [*headers, named]}


def path_of(scope: Scope) -> str:
    """Return a request's path within the application, without the route's prefix."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "").rstrip("/")) or "/"
