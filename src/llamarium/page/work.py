"""Run the work of the page's routes in worker threads, under the server's limits, with errors for the client."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from fastapi import Request, Response
from pydantic_core import to_jsonable_python

from llamarium.errors import LlamariumError
from llamarium.generation.text_engine import TextEngine
from llamarium.page.executor import AdaptedModels, Pass
from llamarium.page.passes import Passes
from llamarium.page.schema.base import EndView, has_only_finite
from llamarium.server.errors import ApiError, of_library
from llamarium.server.http.stream import EventStream, Write, event, while_listening
from llamarium.server.lifecycle.service import Service
from llamarium.server.lifecycle.threads import end_if_unwanted, in_own_thread

if TYPE_CHECKING:
    from llamarium.api import Llama

T = TypeVar("T")

_LOOK_S = 0.2  # interval for checking that the engine is still running


def passes_of(request: Request) -> Passes:
    """Return the application's cache of passes."""
    return request.app.state.passes


async def work_on(
    request: Request, field: str, work: "Callable[[Llama, TextEngine], T]", forward_pass: Pass | None = None
) -> T:
    """Run `work` on the model and its engine in a worker thread, and return its result.

    It counts as a running request, so that the server's limit includes it. If the client disconnects, it stops before
    its next batch of tokens.

    Args:
        request: The request.
        field: Field of the request that errors of the library are attributed to.
        work: May import torch.
        forward_pass: Pass whose adapter is applied to the model.

    Raises:
        ApiError: 503 or 429, or an error of `work`.
    """
    with closing(_Worker(request, field, forward_pass)) as worker:
        return await worker.do_while_here(work)


async def stream_on(
    request: Request,
    field: str,
    work: "Callable[[Llama, TextEngine], Iterator[object]]",
    forward_pass: Pass | None = None,
) -> Response:
    """Stream the items of `work` as events, followed by a final event.

    The whole stream counts as one running request; arguments and threads are those of `work_on`, for each item. An
    error before the first event is the response; a later one is an event that ends the stream.
    """
    with ExitStack() as resources:
        worker = resources.enter_context(closing(_Worker(request, field, forward_pass)))
        result = await worker.do_while_here(work)

        def following(llama: "Llama", engine: TextEngine) -> object:
            return next(result, None)

        first = await worker.do_while_here(following)
        produce = partial(_produce, first, partial(worker.do, following))
        service: Service = request.app.state.service
        return EventStream(
            produce, lambda error: event({"type": "error", **error.body}), service.settings.ping_s, resources.pop_all()
        )


class _Worker:
    """Runs work for one client in a thread, and occupies one of the server's request slots until both have ended."""

    def __init__(self, request: Request, field: str, forward_pass: Pass | None) -> None:
        self._request, self._field, self._forward_pass = request, field, forward_pass
        self._service: Service = request.app.state.service
        self._place, self._gone = ExitStack(), threading.Event()
        self._place.enter_context(self._service.admit(1))
        self._running: asyncio.Future[Any] | None = None
        model, self._engine = self._service.require()
        self._llama = cast("Llama", model)

    async def do(self, work: "Callable[[Llama, TextEngine], T]") -> T:
        """Run `work` on the model with the pass's adapter; ApiError 503 if the server stops in the meantime."""
        adapted: AdaptedModels = self._request.app.state.adapted

        def in_turn() -> T:
            with self._engine.step_priority.working(end_if_unwanted):
                return work(adapted.of(self._llama, self._engine, self._forward_pass), self._engine)

        self._running = running = asyncio.ensure_future(_in_thread(self._llama, self._field, in_turn, self._gone))
        while not running.done():  # to be cancelled ends the waiting alone
            await asyncio.wait({running}, timeout=_LOOK_S)
            if not running.done() and self._engine.state in ("stopped", "broken"):
                raise ApiError(503, "the server has been stopped", code="draining")
        return running.result()

    async def do_while_here(self, work: "Callable[[Llama, TextEngine], T]") -> T:
        """As `do`, but raise ApiError 499 as soon as the client disconnects."""
        results = await while_listening(_in_list(self.do(work)), self._request.receive)
        if results is None:
            raise ApiError(499, "the client has left", code="client_left")
        return results[0]

    def close(self) -> None:
        """Want nothing more; a thread that is at work ends before its next part that takes long."""
        self._gone.set()
        running = self._running
        if running is None or running.done():
            self._leave(running)
        else:
            running.add_done_callback(self._leave)

    def _leave(self, running: asyncio.Future[Any] | None) -> None:
        if running is not None and not running.cancelled():
            running.exception()  # an exception that is never read would be logged
        self._place.close()


async def _in_list(work: Awaitable[T]) -> list[T]:
    return [await work]


async def _produce(item: object, step: Callable[[], Awaitable[object]], write: Write) -> None:
    while item is not None:
        await write(event(to_jsonable_python(item)))
        item = await step()
    await write(event(EndView().model_dump()))


async def _in_thread(llama: "Llama", field: str, work: Callable[[], T], gone: threading.Event) -> T:
    try:
        result = await in_own_thread(work, gone)
    except LlamariumError as error:
        raise of_library(error, field=field, source=llama.tokenizer.source) from None
    if not has_only_finite(result):
        message = "the model's numbers are not finite here, so that there is nothing to show"
        raise ApiError(500, message, code="model_error", param=field)
    return result
