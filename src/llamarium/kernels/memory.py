"""Memory: lazily allocated arrays, the amount that is free, and the allocator's settings. Torch-free."""

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
    """Return an array of zeros whose pages are allocated when they are written.

    So a KV cache for a long context costs only the part that is used.

    Args:
        shape: Shape of the array.
        dtype: Dtype of the array.
        huge_pages: Ask Linux for 2 MB pages, for arrays that are written completely.

    Raises:
        MemoryError: If the address space has no room for the array.
    """
    element_type = np.dtype(dtype)
    count = math.prod(shape)
    if count == 0:
        return np.zeros(shape, element_type)
    try:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        memory = mmap.mmap(-1, count * element_type.itemsize, flags=flags)
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(str(error)) from None
    if huge_pages and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # only advice; kernels without huge pages refuse it
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, element_type).reshape(shape)


def free_bytes() -> int:
    """Return the available memory as Linux reports it; on other systems, all of the machine's memory."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def no_room(num_positions: int, num_bytes: int) -> MemoryBudgetError:
    """Return the error for a KV cache that does not fit into memory."""
    return MemoryBudgetError(
        f"a KV cache for {num_positions} tokens takes {num_bytes / 1e9:,.1f} GB, more than is available; ask for fewer "
        "tokens or answers at once"
    )


@functools.cache
def keep_freed() -> None:
    """Make glibc keep freed memory, in pieces below 32 MiB, for this process.

    By default it returns the end of the heap to Linux after each training step and gets new pages in the next one.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        mallopt(-3, 2**25)  # M_MMAP_THRESHOLD: the maximum of glibc's own dynamic threshold
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
