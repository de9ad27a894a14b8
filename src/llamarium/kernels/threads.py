"""Threads of the C kernels and of PyTorch: which may use the processor's cores.

PyTorch and the C kernels each have a pool of threads, and PyTorch's goes on spinning for a while after its work is
done. On cores that both use, each then waits for the other. So whatever runs between two passes of the kernels, and is
too small to gain from threads anyway, runs on one.
"""

import functools
import os
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

_VARIABLE = "OMP_NUM_THREADS"
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
_SPINS = 1000  # docs/decisions/0026-threads-of-training.md has the measurements; libgomp's own is 300,000


class _Held(threading.local):
    wished: int | None = None  # the user's choice, while PyTorch is held to one


_held = _Held()
_before_fork: int | None = None  # of a child: what its parent had, while PyTorch has one


def num_threads() -> int:
    """Return how many threads the kernels use: what PyTorch is set to, and no more than the CPUs that are allowed.

    Where PyTorch is not imported, it is what PyTorch would be set to.
    """
    return min(_held.wished or _before_fork or _torch_threads(), allowed_cpus())


def _torch_threads() -> int:
    # Another thread may be importing PyTorch right now: then the module is there, and its functions are not.
    get: Callable[[], int] | None = getattr(sys.modules.get("torch"), "get_num_threads", None)
    return default_threads() if get is None else get()


def set_num_threads(count: int) -> Callable[[], None]:
    """Let the kernels use so many threads, and PyTorch too, now or from its import on; return what undoes that."""
    threads, variable = _torch_threads(), os.environ.get(_VARIABLE)

    def put_back() -> None:
        os.environ.pop(_VARIABLE, None)
        if variable is not None:
            os.environ[_VARIABLE] = variable
        _set_torch_threads(threads)

    os.environ[_VARIABLE] = str(count)  # PyTorch reads it when it is imported
    _set_torch_threads(count)
    return put_back


@contextmanager
def computing_with(count: int | None) -> Generator[None]:
    """Let the kernels and PyTorch use so many threads in the body; None leaves the number as it is."""
    put_back = None if count is None else set_num_threads(count)
    try:
        yield
    finally:
        if put_back is not None:
            put_back()


def _set_torch_threads(count: int) -> None:
    set_: Callable[[int], None] | None = getattr(sys.modules.get("torch"), "set_num_threads", None)
    if set_ is not None:
        set_(count)


def spin_briefly() -> None:
    """Let PyTorch's threads soon sleep while they wait, if it is imported from now on and the user says nothing else.

    Its OpenMP on Linux, libgomp, lets them spin for milliseconds, in which they hold a core that another program, or
    the very thread that they wait for, would use.
    """
    if not any(name in os.environ for name in _WAITING):
        os.environ["GOMP_SPINCOUNT"] = str(_SPINS)


@contextmanager
def one_torch_thread() -> Generator[None]:
    """Let PyTorch use only the calling thread in the body; the number that it is set to is put back afterwards."""
    import torch

    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    _held.wished = before
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _held.wished = None


def default_threads() -> int:
    """Return how many threads PyTorch would use: what OMP_NUM_THREADS says, else one for each core."""
    given = os.environ.get(_VARIABLE, "").partition(",")[0]
    return int(given) if given.isdecimal() and int(given) > 0 else _num_cores()


@functools.cache
def _num_cores() -> int:
    """Return how many cores this process may run on; those that do the work of two logical processors count once."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    siblings = (Path(f"/sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list") for i in os.sched_getaffinity(0))
    try:
        return len({file.read_text() for file in siblings})
    except OSError:
        return len(os.sched_getaffinity(0))


@functools.cache
def allowed_cpus() -> int:
    """Return how many CPUs this process may keep busy: those it may run on, and no more than its cgroup's quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return count if quota == "max" else max(1, min(count, round(int(quota) / int(period))))
    except (OSError, ValueError):
        return count


def _after_fork_in_child() -> None:
    """Let PyTorch use one thread, since its OpenMP would wait for those that only the parent has.

    The kernels go on with as many as before: their pool starts anew.
    """
    global _before_fork
    if "torch" in sys.modules:
        _before_fork = _held.wished or _before_fork or _torch_threads()
        _set_torch_threads(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
