"""A thread of its own for what may take long: short work shares asyncio's pool, and would queue behind it there."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from llamarium.sampling.grammar import workers

T = TypeVar("T")

_NAME = "llamarium-own"
_this_thread = threading.local()


class AbandonedError(Exception):
    """Nobody waits any more for what a thread is about to do."""


async def in_own_thread(work: Callable[[], T], gone: threading.Event | None = None) -> T:
    """Return what `work` returns; nothing waits for its thread when the process ends.

    Args:
        work: Is called in the thread.
        gone: Is set when nobody wants the result any more; `check_wanted` looks.
    """
    future: Future[T] = Future()

    def run() -> None:
        _this_thread.gone = gone
        if future.set_running_or_notify_cancel():
            workers.run(work, future)

    threading.Thread(target=run, name=_NAME, daemon=True).start()
    return await asyncio.wrap_future(future)


def check_wanted() -> None:
    """End this thread's work if nobody waits for it: called before each part of it that takes long.

    Raises:
        AbandonedError: If nobody does.
    """
    gone: threading.Event | None = getattr(_this_thread, "gone", None)
    if gone is not None and gone.is_set():
        raise AbandonedError


def are_at_work() -> bool:
    """Whether a thread of `in_own_thread` has not ended."""
    return any(thread.name == _NAME for thread in threading.enumerate())
