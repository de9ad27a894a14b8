"""The answers to one prompt of a running engine, for one reader in a thread or an event loop. Torch-free."""

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
    """The answers to one prompt: `result()` and `await` return them complete, iteration yields pieces.

    >>> import asyncio
    >>> async def answer(prompt):
    ...     with llama.engine() as engine:
    ...         return await engine.submit(prompt, temperature=0, max_tokens=6)
    >>> asyncio.run(answer("To be, or not to b")).text
    'e so m'

    Only one thread or event loop may read it. The pieces of `n` answers are interleaved; `Piece.index` says which
    answer a piece belongs to. Closing it, or dropping the last reference, aborts the request.

    Attributes:
        prompt_ids: Token ids of the prompt.
        adapter: Name of the adapter, None for the base model.
        runs_on: The runner at the start of the request, and the index of its adapter there, -1 for none; a name may be
            reused for another adapter later.
        num_cached: Prompt tokens found in the prefix cache; set with the first piece.
        num_disk: Prompt tokens that were read from disk.
        is_edited: Whether the request edits activations.
        root: Prefix key before the prompt's first block.
        number: The engine's number of the request.
        rows: The text of each answer, as far as it has been read.
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
        """The number of answers, `n`."""
        return len(self.rows)

    def begin(self, thread: EngineThread, request: Request) -> Self:
        """Submit the request; errors as `EngineThread.submit`."""
        self_ref, self.runs_on = weakref.ref(self), (thread.engine.runner, request.adapter)

        def deliver(delivered: Sequence[TokenEvent] | Exception) -> Reader | None:
            return None if (answers := self_ref()) is None else answers._take(delivered)

        self.is_edited, self.root = bool(request.edits), thread.engine.root_of(request)
        self.number = thread.submit(request, deliver)
        self._thread = thread
        self._dropped = weakref.finalize(self, thread.abort, self.number)
        return self

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Piece:
        """Wait for the next piece.

        Raises:
            RequestTimeoutError, EngineStoppedError, AnswerError, OverloadedError or SlowReaderError: If it failed.
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
        """Wait for the pieces of the next step, one per answer; return none at the end. Raises as `__next__`."""
        while not self._ready and self._num_open > 0:
            self._push(await self._arrival())
        pieces, self._ready = list(self._ready), deque[Piece]()
        return pieces

    def close(self) -> None:
        """Abort the request unless it has ended; its blocks are freed after the current step.

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
        with suppress(RuntimeError):  # the loop may have been closed
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._wake)

    def result(self, timeout: float | None = None) -> Generation:
        """Wait for the complete answers, up to `timeout` seconds; raises as `__next__`.

        A TimeoutError does not end the request: `result` may be called again.

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
        """Wait for the complete answers in an event loop; raises as `__next__`."""
        return self._whole().__await__()

    async def _whole(self) -> Generation:
        while self._num_open > 0:
            self._push(await self._arrival())
        self._ready.clear()
        return self.generation()

    def generation(self) -> Generation:
        """Return the complete answers after all pieces were read; InputError if the request was closed before."""
        if any(row.finish_reason is None for row in self.rows):
            raise InputError("the request was closed before its answers were complete; there is no result")
        completions = tuple(row.completion() for row in self.rows)
        return Generation(self.prompt_ids, completions, self.rows[0].prompt_logprobs)

    def _take(self, delivered: Sequence[TokenEvent] | Exception) -> Reader | None:
        """Queue a step's events; called in the engine's thread."""
        if self._inbox.qsize() >= self._most_buffered:
            self._abort()
            delivered = SlowReaderError("the answer was ended because the client read it too slowly")
            self._most_buffered = math.inf
        self._inbox.put(delivered)
        return None if self._loop is None else Reader(self._loop, self._wake)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _arrival(self) -> Sequence[TokenEvent] | Exception:
        from asyncio import get_running_loop  # importing asyncio takes longer than the first token of a small model

        self._loop = loop = get_running_loop()
        while self._inbox.empty():
            self._waiter = loop.create_future()
            await self._waiter
        return self._inbox.get_nowait()

    def _push(self, delivered: Sequence[TokenEvent] | Exception) -> None:
        if isinstance(delivered, Exception):
            self._num_open = 0
            raise delivered
        for event in delivered:
            row = self.rows[event.row]
            if row.finish_reason is not None:  # sampled before the engine heard that a stop string had ended the row
                continue
            self.num_cached, self.num_disk = event.num_cached, event.num_disk
            if event.finish_reason == "timeout":
                self.close()
                raise RequestTimeoutError("the request timed out before its answer was finished")
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
