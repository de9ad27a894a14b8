"""Threads of their own for long work, behind which short work in asyncio's pool would queue."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from llamarium.kernels.turns import pause
from llamarium.sampling.grammar import workers

T = TypeVar("T")

_NAME = "llamarium-own"
_this_thread = threading.local()


class AbandonedError(Exception):
    """The result of a thread's work is no longer wanted."""


async def in_own_thread(work: Callable[[], T], gone: threading.Event | None = None) -> T:
    """Return the result of `work` in a daemon thread; `gone` is set once it is not wanted, for `check_wanted`."""
    future: Future[T] = Future()

    def run() -> None:
        _this_thread.gone = gone
        if future.set_running_or_notify_cancel():
            workers.run(work, future)

    threading.Thread(target=run, name=_NAME, daemon=True).start()
    return await asyncio.wrap_future(future)


def check_wanted() -> None:
    """End this thread's work if its result is no longer wanted, and pause; called before each part that takes long."""
    pause()
    end_if_unwanted()


def end_if_unwanted() -> None:
    """End this thread's work, by an AbandonedError, if its result is no longer wanted."""
    gone: threading.Event | None = getattr(_this_thread, "gone", None)
    if gone is not None and gone.is_set():
        raise AbandonedError


def are_at_work() -> bool:
    """Whether a thread of `in_own_thread` is alive."""
    return any(thread.name == _NAME for thread in threading.enumerate())
