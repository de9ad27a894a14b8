"""The server on several machines, as a Ray Serve application (`pip install 'llamarium[ray]'`).

    serve run llamarium.server.ray_serve:build model=smollm2-135m num_cpus=4 allow_anyone=true

A `Front` accepts HTTP requests, applies the server's access rules, and forwards each request to a replica, which has
the model, an engine and the server's routes. A conversation stays with one replica, whose prefix cache has its earlier
turns (`ranking.py`). docs/guides/deploy.md shows how to run it.
"""

from typing import TYPE_CHECKING, Any

from llamarium.extras import optional

if TYPE_CHECKING:
    from llamarium.server.ray_serve.application import build

__all__ = ["build"]


def __getattr__(name: str) -> Any:
    """Import the application, and with it Ray, on first use."""
    if name == "build":
        optional("ray.serve", "ray", "llamarium.server.ray_serve")
        from llamarium.server.ray_serve.application import build

        return build
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
