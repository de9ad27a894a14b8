"""The number of threads that a command computes with, for as long as it runs."""

import os
from threading import Event, Thread

from llamarium.errors import OptionError

_before: list[int] = []  # what PyTorch was set to before each `set_threads` of this command


def set_threads(threads: int | None) -> None:
    """Give PyTorch this many CPU threads until the command ends; None leaves its choice.

    Raises:
        OptionError: If the system does not start so many.
    """
    if threads is not None:
        _check_startable(threads)
        import torch

        _before.append(torch.get_num_threads())
        torch.set_num_threads(threads)


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
            f"{threads} threads cannot be started here, only {count}; give fewer (this machine has {os.cpu_count()} "
            "processors), or lift the limit on memory or processes"
        ) from None
    finally:
        go.set()
        for thread in started:
            if thread.ident is not None:
                thread.join()


def put_threads_back() -> None:
    """Give PyTorch the threads that it had before the command: who calls `main` goes on with their own number."""
    if _before:
        import torch

        torch.set_num_threads(_before[0])
        _before.clear()
