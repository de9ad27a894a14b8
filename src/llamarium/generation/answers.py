"""The answers to one prompt of a running engine, for one reader in a thread or in an event loop. Never torch."""

import math
import queue
import time
import weakref
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

from llamarium.engine.prefix import Key
from llamarium.engine.request import Request, TokenEvent
from llamarium.engine.thread import EngineThread, Reader
from llamarium.errors import InputError, RequestTimeoutError, SlowReaderError
from llamarium.generation.completion import Generation, Piece, RowText

if TYPE_CHECKING:
    import asyncio


class Answers:
    """The answers to one prompt: `result()` and `await` give the whole, iterating gives piece by piece.

    >>> import asyncio
    >>> async def answer(prompt):
    ...     with llama.engine() as engine:
    ...         return await engine.submit(prompt, temperature=0, max_tokens=6)
    >>> asyncio.run(answer("To be, or not to b")).text
    'e so m'

    It is for one reader, in a thread or in an event loop. With `n` answers the pieces come as they are made, with
    `Piece.index`. Dropping or closing it aborts the request.

    Attributes:
        adapter: Which adapter answers; None is the model as it is.
        runs_on: The runner at its beginning, and the number of its adapter there, -1 for none: names may change hands.
        num_cached: How many prompt tokens were found in the prefix cache; known with the first piece.
        num_disk: How many of those came from disk.
        is_edited: Whether the request changes what the model computes.
        root: The prefix key that its prompt's first block goes on from.
        number: The request's, as the engine counts them.
        rows: The text of each, as far as it has been read.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        rows: list[RowText],
        *,
        adapter: str | None = None,
        most_buffered: float = math.inf,
    ) -> None:
        self.prompt_ids, self.adapter = tuple(prompt_ids), adapter
        self.num_cached = self.num_disk = 0
        self.is_edited, self.root, self.number = False, Key(), -1
        self.rows, self._num_open = rows, len(rows)
        self._most_buffered = most_buffered
        self._inbox = queue.SimpleQueue[Sequence[TokenEvent] | Exception]()
        self._ready = deque[Piece]()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._thread: EngineThread | None = None

    @property
    def num_answers(self) -> int:
        """How many there are to the prompt."""
        return len(self.rows)

    def begin(self, thread: EngineThread, request: Request) -> Self:
        """Submit the request; errors as `EngineThread.submit`."""
        me, self.runs_on = weakref.ref(self), (thread.engine.runner, request.adapter)

        def deliver(came: Sequence[TokenEvent] | Exception) -> Reader | None:
            return None if (answers := me()) is None else answers._take(came)

        self.is_edited, self.root = bool(request.edits), thread.engine.root_of(request)
        self.number = thread.submit(request, deliver)
        self._thread = thread
        self._dropped = weakref.finalize(self, thread.abort, self.number)
        return self

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Piece:
        """Wait for the next piece.

        RequestTimeoutError, EngineStoppedError, AnswerError, GaveWayError or SlowReaderError end the answer.
        """
        while not self._ready:
            if self._num_open == 0:
                raise StopIteration
            self._push(self._inbox.get())
        return self._ready.popleft()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Piece:
        """Wait for the next piece; raises as `__next__`."""
        while not self._ready:
            if self._num_open == 0:
                raise StopAsyncIteration
            self._push(await self._arrival())
        return self._ready.popleft()

    async def arrived(self) -> list[Piece]:
        """Wait for the next step's pieces, one for each answer; none at the end. Raises as `__next__`."""
        while not self._ready and self._num_open > 0:
            self._push(await self._arrival())
        pieces, self._ready = list(self._ready), deque[Piece]()
        return pieces

    def close(self) -> None:
        """Abort the request, if it has not ended; its blocks are free after the current step.

        >>> with llama.engine() as engine:
        ...     answers = engine.submit("To be", max_tokens=100)
        ...     answers.close()
        ...     list(answers)
        []
        """
        self._ready.clear()
        if self._num_open == 0:
            return
        self._num_open = 0
        self._abort()
        self._inbox.put(())  # wakes a waiting thread
        with suppress(RuntimeError):  # of a loop that was closed
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._wake)

    def result(self, timeout: float | None = None) -> Generation:
        """Wait for the whole, up to `timeout` seconds; raises as `__next__`.

        TimeoutError if it was not complete by then: the request goes on, and `result` may be called again.

        >>> with llama.engine() as engine:
        ...     engine.submit(llama.encode("To be, or not to b"), temperature=0, max_tokens=6).result(timeout=60).text
        'e so m'
        """
        deadline_s = None if timeout is None else time.monotonic() + timeout
        while self._num_open > 0:
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            try:
                self._push(self._inbox.get(timeout=left_s))
            except queue.Empty:
                raise TimeoutError(f"the answer was not complete after {timeout} s") from None
        self._ready.clear()
        return self.generation()

    def __await__(self) -> Generator[Any, None, Generation]:
        """Wait for the whole in an event loop; raises as `__next__`."""
        return self._whole().__await__()

    async def _whole(self) -> Generation:
        while self._num_open > 0:
            self._push(await self._arrival())
        self._ready.clear()
        return self.generation()

    def generation(self) -> Generation:
        """Return the whole, once all pieces have been taken; InputError if the request was ended before."""
        if any(row.finish_reason is None for row in self.rows):
            raise InputError("the request was ended before its answers were complete; there is nothing to collect")
        completions = tuple(row.completion() for row in self.rows)
        return Generation(self.prompt_ids, completions, self.rows[0].prompt_logprobs)

    def _take(self, came: Sequence[TokenEvent] | Exception) -> Reader | None:
        """Take a step's events, in the engine's thread."""
        if self._inbox.qsize() >= self._most_buffered:
            self._abort()
            came = SlowReaderError("the answer was not read as fast as it came, and has been ended")
            self._most_buffered = math.inf
        self._inbox.put(came)
        return None if self._loop is None else Reader(self._loop, self._wake)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _arrival(self) -> Sequence[TokenEvent] | Exception:
        from asyncio import get_running_loop  # asyncio takes longer to import than a small answer to begin

        self._loop = loop = get_running_loop()
        while self._inbox.empty():
            self._waiter = loop.create_future()
            await self._waiter
        return self._inbox.get_nowait()

    def _push(self, came: Sequence[TokenEvent] | Exception) -> None:
        if isinstance(came, Exception):
            self._num_open = 0
            raise came
        for event in came:
            row = self.rows[event.row]
            if row.finish_reason is not None:  # chosen while its stop string was found
                continue
            self.num_cached, self.num_disk = event.num_cached, event.num_disk
            if event.finish_reason == "timeout":
                self.close()
                raise RequestTimeoutError("the answer did not come to its end in the time that the request had")
            piece = row.push(event)
            if row.failure is not None:
                self.close()
                raise row.failure
            self._ready.append(piece)
            if piece.finish_reason is not None:
                self._num_open -= 1
                if event.finish_reason is None:
                    self._abort(event.row)
        if self._num_open == 0:
            self._dropped.detach()  # the engine has nothing left to abort

    def _abort(self, row: int | None = None) -> None:
        """Abort one of the answers, or the request."""
        if self._thread is not None:
            self._thread.abort(self.number, row)
