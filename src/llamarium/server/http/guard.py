"""Access: the server's own host names, pages of allowed origins, and API keys."""

import hashlib
import hmac

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from llamarium.server.errors import ApiError
from llamarium.server.hosts import host_name, is_address, is_everywhere, own_names
from llamarium.server.settings import Settings

OPEN_PATHS = frozenset({"/health"})
"""Paths that need no key."""

_KEY_HEADERS = (b"authorization", b"x-api-key")


class Guard:
    """Refuses requests without access; `open_paths` and `OPEN_PATHS` need no key."""

    def __init__(self, app: ASGIApp, settings: Settings, open_paths: frozenset[str] = frozenset()) -> None:
        self._app, self._settings, self._open_paths = app, settings, OPEN_PATHS | open_paths
        self._keys = [hashlib.sha256(key.encode()).digest() for key in settings.api_keys]
        self._names = own_names(settings.host, settings.allowed_hosts)
        self._any_address = settings.uds is None and is_everywhere(settings.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        try:
            self._check(scope)
        except ApiError as error:
            await error.response(scope["path"], scope["request_id"])(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers = [(name, value.decode("latin-1")) for name, value in scope["headers"]]
        hosts = [value for name, value in headers if name == b"host"]
        origins = [value for name, value in headers if name == b"origin"]
        self._check_host(hosts)
        for origin in origins:
            self._check_origin(origin, hosts)
        if self._keys and scope["path"] not in self._open_paths and scope["method"] != "OPTIONS":
            self._check_key([(name, value) for name, value in headers if name in _KEY_HEADERS])

    def _check_host(self, hosts: list[str]) -> None:
        """Refuse other host names: a page's own name can be made to point here (DNS rebinding)."""
        name = host_name(hosts[0]) if len(hosts) == 1 else ""
        if not name:
            message = "a request needs one Host header: a name or an address, and perhaps a port"
            raise ApiError(400, message, code="invalid_http")
        if self._settings.uds is not None or name in self._names or (self._any_address and is_address(name)):
            return
        message = "this host name is not the server's own; start it with --allowed-host to allow it"
        raise ApiError(403, message, code="host_not_allowed")

    def _check_origin(self, origin: str, hosts: list[str]) -> None:
        """Refuse pages of other origins than the server itself and the allowed ones."""
        allowed = self._settings.cors_origins
        own = {f"{scheme}://{host}" for scheme in ("http", "https") for host in hosts}
        if origin in own or origin in allowed or "*" in allowed:
            return
        message = "pages of this origin may not ask; start the server with --cors-origin to let them"
        raise ApiError(403, message, code="origin_not_allowed")

    def _check_key(self, given: list[tuple[bytes, str]]) -> None:
        """Refuse a request without a key or with a wrong one; a proxy may read another header than this server."""
        if len(dict(given)) < len(given):
            raise ApiError(400, "a key's header stands twice; send one", code="invalid_http")
        if given and all(self._is_key(value) for _, value in given):
            return
        message = "no valid API key was given, or another one beside it; send the header Authorization: Bearer KEY"
        raise ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})

    def _is_key(self, value: str) -> bool:
        digest = hashlib.sha256(key_in(value).encode("latin-1")).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._keys]  # in equal time
        return any(matches)


def key_in(value: str) -> str:
    """Return the key in the value of a header."""
    scheme, _, rest = value.partition(" ")
    return rest.strip() if scheme.lower() == "bearer" else value


def owner_of(request: Request) -> str:
    """Return the key of a request: what is kept under it is found with no other one. "" on a server without keys."""
    given = request.headers.get("authorization") or request.headers.get("x-api-key") or ""
    return key_in(given) if request.app.state.service.settings.api_keys else ""
