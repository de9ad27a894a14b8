"""The number of CPU threads of a command."""

import os
from collections.abc import Callable
from threading import Event, Thread

from llamarium.errors import OptionError, counted
from llamarium.kernels.threads import set_num_threads

_put_back: list[Callable[[], None]] = []  # restores the previous number, for each `set_threads` of this command


def set_threads(threads: int | None) -> None:
    """Set the number of CPU threads until the command ends; None leaves it unchanged."""
    if threads is not None:
        _check_startable(threads)
        _put_back.append(set_num_threads(threads))


def _check_startable(threads: int) -> None:
    """Start as many threads for a moment: OpenMP, which cannot start its own, would end the process by itself.

    Two for each, since the C kernels have theirs besides; not where there are processors for all.
    """
    if threads <= (os.cpu_count() or 1):
        return
    go = Event()
    started: list[Thread] = []
    try:
        for _ in range(2 * threads):
            started.append(Thread(target=go.wait, daemon=True))
            started[-1].start()
    except (RuntimeError, MemoryError):
        count = (len(started) - 1) // 2
        raise OptionError(
            f"{counted(threads, 'thread')} cannot be started here, only {count}; give fewer (this "
            f"machine has {os.cpu_count()} "
            "processors), or lift the limit on memory or processes"
        ) from None
    finally:
        go.set()
        for thread in started:
            if thread.ident is not None:
                thread.join()


def put_threads_back() -> None:
    """Restore the number of threads from before `main`."""
    while _put_back:
        _put_back.pop()()
