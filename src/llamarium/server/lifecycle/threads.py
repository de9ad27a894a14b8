"""Dedicated threads for long work, so that short work does not queue behind it in asyncio's thread pool."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from llamarium.kernels.step_priority import pause
from llamarium.sampling.grammar import workers

T = TypeVar("T")

_NAME = "llamarium-own"
_this_thread = threading.local()


class AbandonedError(Exception):
    """The result of a thread's work is no longer needed, e.g. because the client has disconnected."""


async def in_own_thread(work: Callable[[], T], gone: threading.Event | None = None) -> T:
    """Run `work` in a new daemon thread and return its result.

    Args:
        work: The work. It can call `check_wanted` to stop early.
        gone: Set by the caller when the result is no longer needed.
    """
    future: Future[T] = Future()

    def run() -> None:
        _this_thread.gone = gone
        if future.set_running_or_notify_cancel():
            workers.run(work, future)

    threading.Thread(target=run, name=_NAME, daemon=True).start()
    return await asyncio.wrap_future(future)


def check_wanted() -> None:
    """Let waiting engine steps run, then stop if the result is no longer needed. Call it before each long step.

    Raises:
        AbandonedError: If the result is no longer needed.
    """
    pause()
    end_if_unwanted()


def end_if_unwanted() -> None:
    """Stop this thread's work if its result is no longer needed.

    Raises:
        AbandonedError: If the result is no longer needed.
    """
    gone: threading.Event | None = getattr(_this_thread, "gone", None)
    if gone is not None and gone.is_set():
        raise AbandonedError


def are_at_work() -> bool:
    """Whether a thread of `in_own_thread` is alive."""
    return any(thread.name == _NAME for thread in threading.enumerate())
