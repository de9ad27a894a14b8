"""Messages between fronts and replicas."""

from dataclasses import dataclass
from typing import Any

from starlette.types import Scope

_FORWARDED = ("method", "path", "query_string", "client", "http_version")

IDS = (b"x-request-id", b"request-id")
"""Headers with a request's id, which the front assigns."""


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A request forwarded to a replica.

    Attributes:
        scope: Parts of the request's ASGI scope.
        body: The request's body.
        conversation: Name of the conversation, or None.
        full: Names of the replicas that have rejected the request because they are full.
    """

    scope: dict[str, Any]
    body: bytes = b""
    conversation: str | None = None
    full: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of a replica's reply.

    Attributes:
        status: HTTP status.
        headers: Headers, with names in lower case.
        body: The complete body, or None for a stream.
        replica: Name of the replica.
    """

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes | None
    replica: str


def forwarded_scope(scope: Scope) -> dict[str, Any]:
    """Return the parts of a request's scope that are forwarded."""
    headers = [header for header in scope["headers"] if header[0] not in IDS]
    id_header = (IDS[0], scope["request_id"].encode())
    return {name: scope[name] for name in _FORWARDED if name in scope} | {"headers": [*headers, id_header]}


def path_of(scope: Scope) -> str:
    """Return a request's path within the application, without the route's prefix."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "").rstrip("/")) or "/"
