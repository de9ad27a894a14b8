"""A replica: the model, its engine and the server's routes, which fronts call through Ray instead of HTTP."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator

from starlette.types import Message

import llamarium.api
from llamarium.engine.proposers.lookup import POOL_BYTES, PromptLookup
from llamarium.errors import EngineStoppedError
from llamarium.generation.text_engine import TextEngine
from llamarium.server.app import create_routes
from llamarium.server.http.access import Access, Log, http_scope
from llamarium.server.lifecycle.loading import ModelLoader, Progress
from llamarium.server.lifecycle.service import ServedModel, Service, check_context
from llamarium.server.ray_serve.forward import Forwarded, Head
from llamarium.server.ray_serve.options import ModelOptions
from llamarium.server.settings import Settings

_LOOK_S = 0.05  # interval between checks of the model or its engine
_BREAKING_S = 0.5  # time for fronts to receive the errors of a failed engine


class Replica:
    """Answers forwarded requests. Ray sends requests only after the constructor has returned."""

    async def __init__(self, model: ModelOptions, names: tuple[str, ...], settings: Settings) -> None:
        self._service = Service(ModelLoader(lambda report: _load(model, settings, report)), settings)
        while self._service.loading.is_running:
            await asyncio.sleep(_LOOK_S)
        if self._service.loading.failure is not None:
            raise self._service.loading.failure
        self._app = Access(create_routes(self._service, names), Log(settings.log_format))
        self._name = _name()
        self._asked = set[asyncio.Task[None]]()
        self._watcher = asyncio.create_task(self._watch())

    async def answer(self, forwarded: Forwarded) -> AsyncIterator[Head | bytes]:
        """Yield a reply's head, then the pieces of a stream."""
        run = RoutedRequest(forwarded, self._name)
        task = asyncio.create_task(run.through(self._app))
        self._asked.add(task)
        task.add_done_callback(self._asked.discard)
        try:
            async for part in run.parts():
                yield part
        finally:
            run.left.set()

    async def metrics(self, forwarded: Forwarded) -> tuple[str, str]:
        """Return the replica's name and its metrics."""
        heads = [part async for part in self.answer(forwarded)]
        assert isinstance(heads[0], Head) and heads[0].body is not None
        return self._name, heads[0].body.decode()

    async def _watch(self) -> None:
        """Exit the process when the engine has failed; Ray then starts a new replica."""
        while self._service.state == "ready":
            await asyncio.sleep(_LOOK_S)
        Log(self._service.settings.log_format).event("the engine failed")
        await asyncio.sleep(_BREAKING_S)
        sys.stderr.flush()
        os._exit(1)


class RoutedRequest:
    """A request being handled by the routes; `left` is set when the reply is no longer needed."""

    def __init__(self, forwarded: Forwarded, replica: str) -> None:
        self.left = asyncio.Event()
        self._asked, self._replica = forwarded, replica
        self._is_read = False
        self._outbox = asyncio.Queue[Message | None]()

    async def through(self, app: Access) -> None:
        """Call the routes."""
        try:
            await app(http_scope(**self._asked.scope), self._receive, self._outbox.put)
        finally:
            self._outbox.put_nowait(None)

    async def parts(self) -> AsyncIterator[Head | bytes]:
        """Yield a complete reply in one part, or a stream's head and its pieces as they arrive."""
        start = await self._next()
        headers = [(name.lower(), value) for name, value in start["headers"]]
        if any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers):
            yield Head(start["status"], headers, None, self._replica)
            async for piece in self._pieces():
                yield piece
        else:
            body = b"".join([piece async for piece in self._pieces()])
            yield Head(start["status"], headers, body, self._replica)

    async def _pieces(self) -> AsyncIterator[bytes]:
        is_open = True
        while is_open:
            pieces = list[bytes]()
            while is_open and not (pieces and self._outbox.empty()):
                message = await self._next()
                pieces.append(message.get("body", b""))
                is_open = message.get("more_body", False)
            if joined := b"".join(pieces):
                yield joined

    async def _next(self) -> Message:
        message = await self._outbox.get()
        if message is None:
            raise EngineStoppedError("the answer was interrupted; see the replica's log")
        return message

    async def _receive(self) -> Message:
        if not self._is_read:
            self._is_read = True
            return {"type": "http.request", "body": self._asked.body, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}


def _name() -> str:
    from ray import serve

    return serve.get_replica_context().replica_id.unique_id


def _load(model: ModelOptions, settings: Settings, report: Progress) -> tuple[ServedModel, TextEngine]:
    llama = llamarium.api.load(**model.load_options(), progress=report)
    draft = None if model.draft_model is None else llamarium.api.load(**model.draft_options(), progress=report)
    pool_bytes = POOL_BYTES if model.ngram_pool is None else model.ngram_pool
    lookup = PromptLookup(pool_bytes=pool_bytes) if model.prompt_lookup else False
    engine = llama.engine(**model.engine_options(), prompt_lookup=lookup, draft_model=draft)
    check_context(engine, settings.max_context)
    return llama, engine
