"""A front: accepts HTTP requests like the server does, and forwards them to a replica.

The front applies access rules, size limits of bodies and request timeouts; everything else is done by the replica,
whose reply is relayed as it arrives. If a replica dies, its streams end with an error event, other requests with 503.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, closing
from dataclasses import replace
from functools import partial
from typing import Any

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RequestCancelledError
from ray.serve.handle import DeploymentHandle
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from llamarium.server.app import layered
from llamarium.server.errors import JSON, ApiError, internal_error
from llamarium.server.http.access import Log
from llamarium.server.http.body import BOUNDS, Bodies, Held, read_bounded
from llamarium.server.ray_serve.cluster import Cluster
from llamarium.server.ray_serve.conversation import conversation_of
from llamarium.server.ray_serve.forward import Forwarded, Head, forwarded_scope, path_of
from llamarium.server.ray_serve.relay import Relay
from llamarium.server.settings import Settings
from llamarium.strict_json import NotJson, parse_json

_LARGE = 2**16  # bytes; larger bodies are parsed in a thread
_MAX_TRIED = 3  # maximum number of replicas tried for a request


class Front:
    """The deployment class of a front."""

    def __init__(self, replicas: DeploymentHandle[Any], settings: Settings) -> None:
        self._app = Mounted(layered(Forward(replicas, settings), settings, Log(settings.log_format)))

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the application for Ray's proxies."""
        return self._app


class Mounted:
    """Strips the route's prefix from paths, and `x-request-id` from replies, as Ray's proxies add it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            return

        async def send_without_id(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [header for header in message["headers"] if header[0] != b"x-request-id"]
            await send(message)

        await self._app({**scope, "path": path_of(scope), "root_path": ""}, receive, send_without_id)


class Forward:
    """The routes: answers health and metrics for all replicas, and forwards other requests to one of them."""

    def __init__(self, replicas: DeploymentHandle[Any], settings: Settings) -> None:
        self._settings, self._bodies = settings, Bodies()
        self._answers = replicas.options(method_name="answer", stream=True)
        self._cluster = Cluster(replicas)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        forwarded = forwarded_scope(scope)
        try:
            if (forwarded["method"], forwarded["path"]) == ("GET", "/health"):
                health = await self._cluster.health()
                await JSON(health, 200 if health["status"] == "ready" else 503)(scope, receive, send)
            elif (forwarded["method"], forwarded["path"]) == ("GET", "/metrics"):
                await (await self._cluster.metrics(forwarded))(scope, receive, send)
            else:
                with closing(Held(self._bodies)) as held:
                    request = await self._read(forwarded, Request(scope, receive), held)
                    await self._pass_on(request, Relay(scope, receive, send), held)
        except ClientDisconnect:
            await Response(status_code=499)(scope, receive, send)
        except ApiError as error:
            await error.response(scope["path"], scope["request_id"])(scope, receive, send)

    async def _read(self, forwarded: dict[str, Any], request: Request, held: Held) -> Forwarded:
        body = await read_bounded(request.stream(), self._settings, held)
        name = partial(_conversation, forwarded["path"], body)
        return Forwarded(forwarded, body, await asyncio.to_thread(name) if len(body) > _LARGE else name())

    async def _pass_on(self, forwarded: Forwarded, relay: Relay, held: Held) -> None:
        """Relay a reply as it arrives; with its first part the replica has read the body, which is released."""
        try:
            async with asyncio.timeout(self._settings.request_timeout_s), aclosing(self._answer(forwarded)) as answer:
                async for part in answer:
                    held.close()
                    await relay.pass_on(part)
        except Exception as error:  # noqa: BLE001 - any error becomes a reply
            await relay.refuse(_refusal(error), error)
        else:
            await relay.end()

    async def _answer(self, forwarded: Forwarded) -> AsyncGenerator[Head | bytes]:
        """Yield a reply's parts; if a replica turns out to be full, try others."""
        for num_left in reversed(range(_MAX_TRIED)):
            answer: Any = self._answers.remote(forwarded)
            full = ""
            try:
                async for part in answer:
                    if num_left and isinstance(part, Head) and part.status == 429:
                        full = part.replica
                    elif not full:
                        yield part
            except BaseException:  # including cancellation when the client disconnects
                answer.cancel()
                raise
            if not full:
                return
            forwarded = replace(forwarded, full=forwarded.full | {full})


def _conversation(path: str, body: bytes) -> str | None:
    """Return the name of a request's conversation; None for an invalid body, which the replica rejects."""
    try:
        return conversation_of(path, parse_json(body, **BOUNDS))
    except NotJson:
        return None


def _refusal(error: Exception) -> ApiError:
    if isinstance(error, BackPressureError):
        message = f"the queue is full ({error.args[1]} requests); try again later"
        return ApiError(429, message, code="rate_limit_exceeded", headers={"retry-after": "1"})
    if isinstance(error, TimeoutError):
        message = "the request timed out before the answer was complete"
        return ApiError(408, message, code="request_timeout")
    if isinstance(error, DeploymentUnavailableError):
        return ApiError(503, "no replica could be started; see the cluster's log", code="unavailable")
    if isinstance(error, RayActorError | RequestCancelledError):
        message = "the replica failed or was stopped while answering; try again"
        return ApiError(503, message, code="unavailable", headers={"retry-after": "1"})
    return internal_error()
