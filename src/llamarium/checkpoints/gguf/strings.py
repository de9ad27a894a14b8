"""Strings as a GGUF file holds them, each after its length in eight bytes, thousands at once.

A vocabulary and its merges are 100,000 to 400,000 strings. One by one, they take longer than everything else in the
header of a file.
"""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Places = NDArray[np.int64]

_BYTES_AT_ONCE = 2**20


def find_short_strings(data: bytes, count: int) -> Places | None:
    """Find where each of `count` strings begins, with its length, and where the last one ends.

    If all are shorter than 256 bytes, their lengths are the only small numbers of eight bytes, so all are found at
    once, not one after the other.

    Args:
        data: Begins with the first string; something else may follow the last one.
        count: How many strings there are.

    Returns:
        `count` + 1 places; None where this does not work: a string is long or empty, has zeros in it, or begins
        behind `data`.
    """
    numbers = _numbers(data)
    begins = np.flatnonzero(numbers < 256)[:count]
    ends = begins + 8 + numbers[begins].astype(np.int64)
    if not count or len(begins) < count or begins[0] or not np.array_equal(begins[1:], ends[:-1]):
        return None
    return np.append(0, ends)


def decode_strings(data: bytes, places: Places) -> list[str]:
    """Decode strings.

    Args:
        data: The strings with their lengths.
        places: Where each of them begins, with its length, and where the last one ends.
    """
    if len(places) > 2 and len(data) <= _BYTES_AT_ONCE:
        joined = bytearray(data)
        _numbers(joined)[places[:-1]] = 0  # the lengths become separators
        text = joined.decode()
        if text.count("\0") == 8 * len(places) - 8:  # no string holds a zero itself
            return text.split("\0" * 8)[1:]
    return [data[start + 8 : end].decode() for start, end in pairwise(places.tolist())]


def _numbers(data: bytes | bytearray) -> NDArray[np.uint64]:
    """Return the numbers of eight bytes that begin at each byte."""
    return np.ndarray(max(0, len(data) - 7), "<u8", data, strides=(1,))
