"""Find earlier occurrences of an n-gram in a growing sequence or in a bounded pool of texts. Torch-free.

Both store the place after each n-gram in a hash table of fixed size. A newer n-gram with the same hash replaces an
older one. Candidates are compared token by token, so a collision never yields a wrong place.

Source: the pool resembles llama.cpp's `ngram-mod`, which stores a next token per hash instead of a place in a text.
"""

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Text: TypeAlias = "Sequence[int] | memoryview[int]"

SIZES = (6, 3)
"""Lengths of the n-grams that are looked up, longest first."""

MAX_MATCH = 24
"""Maximum number of tokens that are compared before a place; longer matches do not improve a draft."""

_LONGEST, _SHORTEST = SIZES[0], SIZES[-1]
_FACTOR = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: the upper bits of a product depend on all lower bits
_MASK = 2**64 - 1
_FEW = 24  # up to so many n-grams are entered in a loop, which is faster than numpy
_END = -1  # follows each text of a pool
_BLOCK = 32  # tokens; the unit in which a pool skips text that it holds already
_ENTRY_BYTES = 4 * (1 + len(SIZES))  # of a pool's token: the token and its slot in each table


class PlaceTables:
    """Hash tables of the newest place after each n-gram, one per size, with `num_slots` (a power of two) slots each."""

    def __init__(self, num_slots: int) -> None:
        self._shift = 64 - (num_slots.bit_length() - 1)
        self._tables = [np.zeros(num_slots, np.int32) for _ in SIZES]

    @property
    def num_bytes(self) -> int:
        """Size of the tables, in bytes."""
        return sum(table.nbytes for table in self._tables)

    def enter(self, ids: Sequence[int], first: int, end: int, base: int = 0) -> None:
        """Enter the n-grams before `ids[first]` to `ids[end - 1]`; `base` is added to their places."""
        if end - first > _FEW:
            self._enter_many(ids, first, end, base)
            return
        for place in range(max(first, _SHORTEST), end):
            for table, slot in self._slots(ids, place):
                table[slot] = base + place

    def find(self, ids: Sequence[int], place: int, text: Text) -> tuple[int, int]:
        """Return the place in `text` after the n-gram before `ids[place]`, and the length of the match, or (0, 0).

        `text` is the one whose n-grams were entered.
        """
        for size, (table, slot) in zip(SIZES, self._slots(ids, place), strict=False):
            candidate = int(table[slot])
            if candidate and (length := match_length(text, candidate, ids, place)) >= size:
                return candidate, length
        return 0, 0

    def places_after(self, ids: NDArray[np.uint64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return candidate places after the longest n-grams that precede each of `ends`."""
        hashes = np.zeros(len(ends), np.uint64)
        for offset in range(-_LONGEST, 0):
            hashes = (hashes + ids[ends + offset]) * np.uint64(_FACTOR)
        return self._tables[0][hashes >> np.uint64(self._shift)].astype(np.int64)

    def _slots(self, ids: Sequence[int], place: int) -> Iterator[tuple[NDArray[np.int32], int]]:
        """Yield each table with the slot of the n-gram before `ids[place]`."""
        for size, table in zip(SIZES, self._tables, strict=True):
            value = 0
            for token_id in ids[max(0, place - size) : place]:
                value = (value + token_id) * _FACTOR & _MASK
            yield table, value >> self._shift

    def _enter_many(self, ids: Sequence[int], first: int, end: int, base: int) -> None:
        start = max(0, first - _LONGEST)
        tokens = np.array(ids[start:end], np.uint64)
        for size, table in zip(SIZES, self._tables, strict=True):
            begin = max(first, size)  # the first place that a whole n-gram precedes
            count = end - begin
            if count <= 0:
                continue
            hashes = np.zeros(count, np.uint64)
            for offset in range(begin - size - start, begin - start):
                hashes = (hashes + tokens[offset : offset + count]) * np.uint64(_FACTOR)
            table[hashes >> np.uint64(self._shift)] = np.arange(base + begin, base + end, dtype=np.int32)


class NgramIndex:
    """An n-gram index of a growing list of ids; `find` enters the appended ones.

    It is sized for `num_tokens`; in a longer sequence, older n-grams are found less often.
    """

    def __init__(self, ids: list[int], num_tokens: int) -> None:
        self.ids = ids
        self._tables = PlaceTables(_slots_for(min(max(num_tokens, len(ids)), 2**17)))
        self._num_entered = 0  # number of places whose preceding n-grams are in the tables

    def find(self, ids: Sequence[int], end: int) -> tuple[int, int]:
        """Return the place after an earlier occurrence of the tokens before `end`, and its match length, or (0, 0)."""
        if self._num_entered < end:
            self._tables.enter(ids, self._num_entered, end)
        place_and_length = self._tables.find(ids, end, ids)
        self._tables.enter(ids, end, end + 1)
        self._num_entered = end + 1
        return place_and_length if place_and_length[0] < end else (0, 0)  # a repeated call may find `end` itself

    def following(self, place: int, count: int) -> list[int]:
        """Return `count` tokens from a place on; past the end they repeat, which continues a loop in the text."""
        following_ids = self.ids[place : place + count]
        while following_ids and len(following_ids) < count:
            following_ids += following_ids[: count - len(following_ids)]
        return following_ids

    def length_at(self, place: int, ids: Sequence[int], end: int) -> int:
        """Return how many of the last tokens before `end` stand before a place."""
        return match_length(ids, place, ids, end) if place < end else 0


class NgramPool:
    """A ring buffer of the newest texts, up to `num_bytes` in total.

    Its capacity is a power of two tokens of 12 bytes each. Blocks of 32 tokens that it already holds are not added
    again, so each turn of a dialog adds only what is new.
    """

    def __init__(self, num_bytes: int) -> None:
        self._allocate(num_bytes // _ENTRY_BYTES)

    def _allocate(self, num_tokens: int) -> None:
        self._capacity = 1 << num_tokens.bit_length() - 1 if num_tokens else 0  # as a table: a slot for each token
        self._tokens = np.zeros(max(1, self._capacity), np.int32)
        self._view = self._tokens.data
        self._tables = PlaceTables(self._capacity) if self._capacity > _BLOCK else None
        self._head = 0  # where the next text is written
        self.num_tokens = 0

    @staticmethod
    def bytes_for(num_tokens: int) -> int:
        """Return the size of a pool that holds a text of `num_tokens` tokens."""
        return _ENTRY_BYTES << (num_tokens + _BLOCK).bit_length()

    @property
    def num_bytes(self) -> int:
        """Size of tokens and tables, in bytes."""
        return self._tokens.nbytes + (0 if self._tables is None else self._tables.num_bytes)

    def clear(self) -> None:
        """Free its memory and keep nothing from now on; places found earlier become invalid."""
        self._allocate(0)

    def add(self, ids: Sequence[int], start: int = 0) -> None:
        """Add a text's tokens from `start` on; only the end of a text that is longer than the pool."""
        max_tokens = self._capacity - _BLOCK
        if self._tables is None or len(ids) <= start:
            return
        context = max(0, start - _LONGEST, len(ids) - max_tokens)
        text = ids[context:]
        for begin, end in self._missing(text):
            self._append(text[max(0, begin - _LONGEST) : end + 1])

    def find(self, ids: Sequence[int], end: int) -> tuple[int, int]:
        """Return the place after an occurrence of the tokens before `end`, and its match length, or (0, 0)."""
        return (0, 0) if self._tables is None else self._tables.find(ids, end, self._view)

    def following(self, place: int, count: int) -> list[int]:
        """Return up to `count` tokens of a text from a place on."""
        following_ids = self._view[place : place + count].tolist()
        return following_ids[: following_ids.index(_END)] if _END in following_ids else following_ids

    def length_at(self, place: int, ids: Sequence[int], end: int) -> int:
        """Return how many of the last tokens before `end` stand before a place."""
        return match_length(self._view, place, ids, end) if place <= len(self._view) else 0

    def _missing(self, ids: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield start and end of each part of a text that the pool does not hold."""
        num_blocks = len(ids) // _BLOCK
        is_held = np.zeros(num_blocks + 1, bool)  # the last entry is the incomplete block, which is always added
        if num_blocks and self._tables is not None:
            tokens = np.array(ids, np.uint64)
            ends = np.arange(1, num_blocks + 1) * _BLOCK
            # The place after a text's last token is never entered, so look up the one before it.
            places = self._tables.places_after(tokens, ends - 1) + 1
            is_inside = (places > _BLOCK) & (places <= self._capacity)
            offsets = np.arange(-_BLOCK, 0)
            pool_tokens = self._tokens[np.where(is_inside, places, _BLOCK)[:, None] + offsets]
            is_held[:-1] = is_inside & (pool_tokens == tokens[ends[:, None] + offsets].astype(np.int32)).all(axis=1)
        begin = None
        for block, is_block_held in enumerate(is_held.tolist()):
            if not is_block_held and begin is None:
                begin = block * _BLOCK
            elif is_block_held and begin is not None:
                yield begin, block * _BLOCK
                begin = None
        if begin is not None and begin < len(ids):
            yield begin, len(ids)

    def _append(self, ids: Sequence[int]) -> None:
        assert self._tables is not None
        if self._head + len(ids) + 1 > self._capacity:
            self._head = 0  # start over; the old texts further on stay valid until they are overwritten
        start, self._head = self._head, self._head + len(ids) + 1
        self._tokens[start : self._head - 1] = ids
        self._tokens[self._head - 1] = _END
        self._tables.enter(ids, 0, len(ids), start)
        self.num_tokens = max(self.num_tokens, self._head)


def match_length(text: Text, place: int, ids: Sequence[int], end: int) -> int:
    """Return how many tokens before `ids[end]` equal those before `text[place]`, up to `MAX_MATCH`."""
    max_length = min(MAX_MATCH, place, end)
    for length in range(1, max_length + 1):
        if text[place - length] != ids[end - length]:
            return length - 1
    return max_length


def _slots_for(num_tokens: int) -> int:
    """Return a power of two above a number of tokens."""
    return 1 << max(6, num_tokens.bit_length())
