"""Memory: lazily allocated arrays, the amount that is free, and the allocator's settings. Torch-free."""

import ctypes
import functools
import math
import mmap
import sys
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from llamarium import system
from llamarium.errors import MemoryBudgetError


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
        memory = system.reserve(count * element_type.itemsize)
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(str(error)) from None
    if huge_pages and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # only advice; kernels without huge pages refuse it
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, element_type).reshape(shape)


def free_bytes() -> int:
    """Return the available memory as Linux and Windows report it; on macOS, all of the machine's memory."""
    available, total = system.memory()
    return total if available is None else available


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
