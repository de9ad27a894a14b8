"""Memory that is reserved now and taken when it is first written, or kept when it is freed. Never torch."""

import ctypes
import functools
import math
import mmap
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from llamarium.errors import MemoryBudgetError

_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0  # Python names MAP_NORESERVE in later versions only


def reserve(shape: tuple[int, ...], dtype: DTypeLike, *, huge_pages: bool = False) -> NDArray[Any]:
    """Return an array of zeros whose pages are taken as they are written: a long context costs what is used of it.

    With `huge_pages` they have 2 MB where Linux grants that, for what is written whole. MemoryError if there is no room
    for the array in the address space.
    """
    kind = np.dtype(dtype)
    count = math.prod(shape)
    if count == 0:
        return np.zeros(shape, kind)
    try:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        memory = mmap.mmap(-1, count * kind.itemsize, flags=flags)
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(str(error)) from None
    if huge_pages and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # advice, which a system may not know
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, kind).reshape(shape)


def free_bytes() -> int:
    """Return the available memory: as Linux reports it, elsewhere all that the machine has."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def no_room(num_positions: int, num_bytes: int) -> MemoryBudgetError:
    """Return the error for keys and values that there is no memory for."""
    return MemoryBudgetError(
        f"keys and values of {num_positions} positions take {num_bytes / 1e9:,.1f} GB, more than there is; ask for "
        "fewer tokens or answers at once"
    )


@functools.cache
def keep_freed() -> None:
    """Let this process keep what it frees in pieces below 32 MiB, where its C library is glibc.

    It gives the heap's end back to Linux after a training step, and takes the pages anew in the next one.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        mallopt(-3, 2**25)  # M_MMAP_THRESHOLD: the largest that glibc would come to by itself
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
