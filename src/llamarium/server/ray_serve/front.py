"""A front: takes HTTP requests as the server does, and has a replica answer them.

Who may ask, a body's bounds and the time that a request has are its own; everything else is the replica's, whose answer
is passed on as it comes. Where a replica dies, its streams end with an error event here, and other requests with 503.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RequestCancelledError
from ray.serve.handle import DeploymentHandle
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from llamarium.server.app import layered
from llamarium.server.errors import JSON, ApiError, internal_error
from llamarium.server.http.body import Bodies, Held, NotJson, parse_json, read_bounded
from llamarium.server.http.log import Log
from llamarium.server.ray_serve.cluster import Cluster
from llamarium.server.ray_serve.conversation import conversation_of
from llamarium.server.ray_serve.forward import Forwarded, Head, path_of, told_of
from llamarium.server.ray_serve.relay import Relay
from llamarium.server.settings import Settings

_LARGE = 2**16  # bytes: read in a thread of its own
_MAX_ASKED = 3  # replicas, one after the other, for a request that finds no place


class Front:
    """What Ray runs.

    Args:
        replicas: Who answers.
        settings: Of the server.
    """

    def __init__(self, replicas: DeploymentHandle[Any], settings: Settings) -> None:
        self._app = Mounted(layered(Forward(replicas, settings), settings, Log(settings.log_format)))

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the application that Ray's proxies send requests to."""
        return self._app


class Mounted:
    """Has requests at their paths within the application, and leaves `x-request-id` to Ray's proxies, which write it.

    Args:
        app: What answers.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            return

        async def tell(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [one for one in message["headers"] if one[0] != b"x-request-id"]
            await send(message)

        await self._app({**scope, "path": path_of(scope), "root_path": ""}, receive, tell)


class Forward:
    """The routes: two that look at all replicas, and the others, which one of them has.

    Args:
        replicas: Who answers.
        settings: Of the server.
    """

    def __init__(self, replicas: DeploymentHandle[Any], settings: Settings) -> None:
        self._settings, self._bodies = settings, Bodies()
        self._answers = replicas.options(method_name="answer", stream=True)
        self._cluster = Cluster(replicas)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        told = told_of(scope)
        try:
            if (told["method"], told["path"]) == ("GET", "/health"):
                health = await self._cluster.health()
                await JSON(health, 200 if health["status"] == "ready" else 503)(scope, receive, send)
            elif (told["method"], told["path"]) == ("GET", "/metrics"):
                await (await self._cluster.metrics(told))(scope, receive, send)
            else:
                with self._bodies.hold() as held:
                    asked = await self._read(told, Request(scope, receive), held)
                    await self._pass_on(asked, Relay(scope, receive, send), held)
        except ClientDisconnect:
            await Response(status_code=499)(scope, receive, send)
        except ApiError as error:
            await error.response(scope["path"], scope["request_id"])(scope, receive, send)

    async def _read(self, told: dict[str, Any], request: Request, held: Held) -> Forwarded:
        body = await read_bounded(request.stream(), self._settings, held)
        return Forwarded(told, body, await _conversation(told["path"], body))

    async def _pass_on(self, asked: Forwarded, relay: Relay, held: Held) -> None:
        """Pass an answer on as it comes; with its first part a replica has read the body."""
        try:
            async with asyncio.timeout(self._settings.request_timeout_s), aclosing(self._answer(asked)) as answer:
                async for part in answer:
                    held.release()
                    await relay.pass_on(part)
        except Exception as error:  # noqa: BLE001 - whatever it was, who waits is told
            await relay.refuse(_refusal(error), error)
        else:
            await relay.end()

    async def _answer(self, asked: Forwarded) -> AsyncGenerator[Head | bytes]:
        """Yield an answer; where a replica has no place after all, others are asked."""
        for others in reversed(range(_MAX_ASKED)):
            answer: Any = self._answers.remote(asked)
            full = ""
            try:
                async for part in answer:
                    if others and isinstance(part, Head) and part.status == 429:
                        full = part.replica
                    elif not full:
                        yield part
            except BaseException:  # also where the client has left
                answer.cancel()
                raise
            if not full:
                return
            asked = replace(asked, full=asked.full | {full})


async def _conversation(path: str, body: bytes) -> str | None:
    """Return the name of a request's conversation, if it has one."""
    return await asyncio.to_thread(_named, path, body) if len(body) > _LARGE else _named(path, body)


def _named(path: str, body: bytes) -> str | None:
    """Return the same; what cannot be read has none, and the replica says why."""
    try:
        return conversation_of(path, parse_json(body))
    except NotJson:
        return None


def _refusal(error: Exception) -> ApiError:
    if isinstance(error, BackPressureError):
        message = f"as many requests wait as may, {error.args[1]}; try again later"
        return ApiError(429, message, code="rate_limit_exceeded", headers={"retry-after": "1"})
    if isinstance(error, TimeoutError):
        message = "the answer did not come to its end in the time that the request had"
        return ApiError(408, message, code="request_timeout")
    if isinstance(error, DeploymentUnavailableError):
        return ApiError(503, "no replica can be started; the cluster's log says why", code="unavailable")
    if isinstance(error, RayActorError | RequestCancelledError):
        message = "the replica that was answering has failed or was stopped; ask again"
        return ApiError(503, message, code="unavailable", headers={"retry-after": "1"})
    return internal_error()
