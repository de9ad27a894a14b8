"""Derive the merges of a byte-level BPE vocabulary given as ranks, in C: `lm_find_merges` of `native/llamarium.h`."""

import secrets
from collections.abc import Sequence
from ctypes import c_char_p, c_int32, c_int64, c_uint64, c_void_p
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from llamarium.errors import MemoryBudgetError, counted
from llamarium.kernels.native import library


def find_merges(tokens: Sequence[bytes]) -> NDArray[np.int32] | None:
    """Return the merges of distinct tokens, given by rank; None if the library or the function is missing.

    Two adjacent tokens are merged if their concatenation is a token, lowest rank first. So a token always results from
    the same pair, which is its only merge. A token that no text is merged into gets all possible pairs.

    Returns:
        Ranks of the two halves, int32 (merges, 2), ordered by the rank of the result.

    Raises:
        MemoryBudgetError: If there is not enough memory for the tables.
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
        raise MemoryBudgetError(f"not enough memory for the merge tables of {counted(len(tokens), 'token')}")
    return merges[:count]
