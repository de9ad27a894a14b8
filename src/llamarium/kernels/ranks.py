"""The merges of a byte-level BPE vocabulary that is a list of ranks, in C: `lm_find_merges` of `native/llamarium.h`."""

import secrets
from collections.abc import Sequence
from ctypes import c_char_p, c_int32, c_int64, c_uint64, c_void_p
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from llamarium.errors import MemoryBudgetError, counted
from llamarium.kernels.native import library


def find_merges(tokens: Sequence[bytes]) -> NDArray[np.int32] | None:
    """Return the merges of tokens by rank, all of them different, or None if the library is missing or has no such.

    Two neighbours join if together they are a token, the lowest rank first. So each token is made of the same two
    wherever it is made, and there is one merge for it. Those that no text is merged into have all ways to cut them.

    Returns:
        Ranks of the two halves, int32 (merges, 2); those that lead to a lower rank first.

    Raises:
        MemoryBudgetError: If there is no memory for the tables.
    """
    find = getattr(library(), "lm_find_merges", None)
    if find is None:
        return None
    find.argtypes, find.restype = [c_char_p, c_void_p, c_int32, c_uint64, c_void_p], c_int64
    text = b"".join(tokens)
    ends = np.fromiter(accumulate(map(len, tokens)), np.int64, len(tokens))
    merges = np.empty((len(text), 2), np.int32)
    count = find(text, ends.ctypes.data, len(tokens), secrets.randbits(64), merges.ctypes.data)
    if count < 0:
        raise MemoryBudgetError(f"there is no memory left for the tables of {counted(len(tokens), 'token')}")
    return merges[:count]
