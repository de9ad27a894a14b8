"""The files of the built page, which `web/` builds and the package contains, and their HTTP headers."""

import gzip
import re
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import Request, Response
from starlette.routing import Route

from llamarium.page.bundle import DIST, HOW_TO_BUILD, POLICY
from llamarium.server.errors import ApiError

HEADERS: Mapping[str, str] = {
    "content-security-policy": f"{POLICY}; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
"""Headers of every file: no external or inline resources, and no embedding in frames of other pages."""

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".woff2": "font/woff2",
    ".svg": "image/svg+xml",
    ".png": "image/png",
}
_PACKED = frozenset({".woff2", ".png"})  # already compressed


@dataclass(frozen=True, slots=True)
class Asset:
    """A file of the page.

    Attributes:
        never_changes: True if its name contains a hash of its content, so that it can be cached forever.
        zipped: The gzipped content, or None if the format is already compressed.
    """

    body: bytes
    media_type: str
    never_changes: bool
    zipped: bytes | None

    @classmethod
    def of(cls, path: Path) -> "Asset":
        """Read and compress a file; KeyError for a suffix without a media type."""
        body = path.read_bytes()
        zipped = None if path.suffix in _PACKED else gzip.compress(body, mtime=0)
        return cls(body, _TYPES[path.suffix], "assets" in path.parts, zipped)


def read_assets(folder: Path = DIST) -> dict[str, Asset]:
    """Return the page's files by URL path; empty if the page is not built."""
    files = (path for path in folder.rglob("*") if path.suffix in _TYPES)
    assets = {f"/{path.relative_to(folder).as_posix()}": Asset.of(path) for path in files}
    index = assets.pop("/index.html", None)
    return assets if index is None else {"/": index, **assets}


def asset_routes(assets: Mapping[str, Asset]) -> list[Route]:
    """Return the routes of the files, which need no API key; if the page is not built, `/` explains how to build it.

    They are Starlette routes, as creating FastAPI routes for all files takes a third of a second.
    """
    if not assets:
        return [Route("/", _not_built, methods=["GET"])]
    return [Route(path, _sending(asset), methods=["GET", "HEAD"]) for path, asset in assets.items()]


def _sending(asset: Asset) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    cached = "public, max-age=31536000, immutable" if asset.never_changes else "no-cache"

    shared = {**HEADERS, "cache-control": cached, "vary": "accept-encoding"}

    async def send(request: Request) -> Response:
        if asset.zipped is None or not _takes_gzip(request.headers.get("accept-encoding", "")):
            return Response(asset.body, media_type=asset.media_type, headers=shared)
        return Response(asset.zipped, media_type=asset.media_type, headers={**shared, "content-encoding": "gzip"})

    return send


def _takes_gzip(accepted: str) -> bool:
    """Return whether an `accept-encoding` header allows gzip, i.e. with a non-zero quality (RFC 9110, 12.5.3)."""
    for coding in accepted.lower().split(","):
        name, *parameters = coding.replace(" ", "").split(";")
        if name == "gzip":
            return not any(re.fullmatch(r"q=0(\.0*)?", parameter) for parameter in parameters)
    return False


async def _not_built(_: Request) -> Response:
    raise ApiError(404, f"this server was installed without its page; {HOW_TO_BUILD}", code="page_not_built")
