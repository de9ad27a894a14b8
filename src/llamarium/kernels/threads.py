"""Thread counts of the C kernels and of PyTorch.

Both have a thread pool, and PyTorch's threads keep spinning for a while after their work. On shared cores each pool
then waits for the other. So PyTorch operations between two passes of the kernels, which are too small to gain from
threads anyway, run on one thread.
"""

import functools
import os
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from llamarium.system import physical_cores, usable_cpus

_VARIABLE = "OMP_NUM_THREADS"
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
_SPINS = 1000  # measured in docs/decisions/0026-threads-of-training.md; libgomp's default is 300,000


class _Limited(threading.local):
    requested: int | None = None  # the user's setting, while `one_torch_thread` limits PyTorch


_limited = _Limited()
_before_fork: int | None = None  # in a forked child: the parent's setting, while PyTorch is limited to one thread


def num_threads() -> int:
    """Return how many threads the kernels use: PyTorch's setting, or its default, up to `allowed_cpus`."""
    return min(_limited.requested or _before_fork or _torch_threads(), allowed_cpus())


def _torch_threads() -> int:
    # While another thread is importing PyTorch, the module exists without its functions.
    get: Callable[[], int] | None = getattr(sys.modules.get("torch"), "get_num_threads", None)
    return default_threads() if get is None else get()


def set_num_threads(count: int) -> Callable[[], None]:
    """Set the number of threads of the kernels and of PyTorch, imported or not; return a function that undoes it."""
    threads, variable = _torch_threads(), os.environ.get(_VARIABLE)

    def restore() -> None:
        os.environ.pop(_VARIABLE, None)
        if variable is not None:
            os.environ[_VARIABLE] = variable
        _set_torch_threads(threads)

    os.environ[_VARIABLE] = str(count)  # PyTorch reads it when it is imported
    _set_torch_threads(count)
    return restore


@contextmanager
def computing_with(count: int | None) -> Generator[None]:
    """Set the number of threads of the kernels and of PyTorch within the block; None changes nothing."""
    restore = None if count is None else set_num_threads(count)
    try:
        yield
    finally:
        if restore is not None:
            restore()


def _set_torch_threads(count: int) -> None:
    set_: Callable[[int], None] | None = getattr(sys.modules.get("torch"), "set_num_threads", None)
    if set_ is not None:
        set_(count)


def spin_briefly() -> None:
    """Make idle PyTorch threads sleep soon, unless the user has set otherwise; call before PyTorch is imported.

    Its OpenMP on Linux, libgomp, lets them spin for milliseconds, which occupies cores that other programs, or the
    thread that they wait for, could use.
    """
    if not any(name in os.environ for name in _WAITING):
        os.environ["GOMP_SPINCOUNT"] = str(_SPINS)


@contextmanager
def one_torch_thread() -> Generator[None]:
    """Limit PyTorch to the calling thread within the block."""
    import torch

    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    _limited.requested = before
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _limited.requested = None


def default_threads() -> int:
    """Return how many threads PyTorch would use: OMP_NUM_THREADS, else one per core."""
    value = os.environ.get(_VARIABLE, "").partition(",")[0]
    return int(value) if value.isdecimal() and int(value) > 0 else _num_cores()


@functools.cache
def _num_cores() -> int:
    """Return how many physical cores this process may run on."""
    return physical_cores()


@functools.cache
def allowed_cpus() -> int:
    """Return how many CPUs this process may use, by its affinity and its cgroup's quota."""
    count = usable_cpus()
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return count if quota == "max" else max(1, min(count, round(int(quota) / int(period))))
    except (OSError, ValueError):
        return count


def _after_fork_in_child() -> None:
    """Limit PyTorch to one thread in a forked child, where its OpenMP would wait for threads of the parent.

    The kernels keep their number of threads, because their pool restarts after a fork.
    """
    global _before_fork
    if "torch" in sys.modules:
        _before_fork = _limited.requested or _before_fork or _torch_threads()
        _set_torch_threads(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
