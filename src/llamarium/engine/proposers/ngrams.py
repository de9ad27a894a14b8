"""Find where an n-gram stood before: in a growing sequence, or in a bounded pool of texts. Never torch.

Both keep the place after each n-gram in a table of a fixed size, at a hash of the n-gram. A newer n-gram with the same
hash replaces an older one, and what is found is compared token by token, so a table never gives a wrong place.

Source: the pool resembles llama.cpp's `ngram-mod`, which keeps a next token at each hash instead of a place in a text.
"""

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Text: TypeAlias = "Sequence[int] | memoryview[int]"

SIZES = (6, 3)
"""Tokens of the n-grams that are looked up; longer ones first."""

MAX_MATCH = 24
"""Tokens before a place that are compared at most: more of them do not make a draft better."""

_LONGEST, _SHORTEST = SIZES[0], SIZES[-1]
_FACTOR = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio: its products' upper bits depend on all lower ones
_MASK = 2**64 - 1
_FEW = 24  # n-grams that are entered one by one, since arrays cost more
_END = -1  # after each text of a pool
_BLOCK = 32  # tokens that a pool takes or, if it has them, leaves out
_ENTRY_BYTES = 4 * (1 + len(SIZES))  # a token of a pool, and its place in each table


class PlaceTables:
    """The newest place after each n-gram, by its hash; `num_slots` of a power of two for each size."""

    def __init__(self, num_slots: int) -> None:
        self._shift = 64 - (num_slots.bit_length() - 1)
        self._tables = [np.zeros(num_slots, np.int32) for _ in SIZES]

    @property
    def num_bytes(self) -> int:
        """What the tables take."""
        return sum(table.nbytes for table in self._tables)

    def enter(self, ids: Sequence[int], first: int, end: int, base: int = 0) -> None:
        """Enter the n-grams before `ids[first]` to `ids[end - 1]`, whose places are `base` higher."""
        if end - first > _FEW:
            self._enter_many(ids, first, end, base)
            return
        for place in range(max(first, _SHORTEST), end):
            for table, slot in self._slots(ids, place):
                table[slot] = base + place

    def find(self, ids: Sequence[int], place: int, text: Text) -> tuple[int, int]:
        """Return the place in a text after the n-gram before `ids[place]`, and how many tokens agree, or (0, 0).

        The text is what the entered places are in.
        """
        for size, (table, slot) in zip(SIZES, self._slots(ids, place), strict=False):
            candidate = int(table[slot])
            if candidate and (length := match_length(text, candidate, ids, place)) >= size:
                return candidate, length
        return 0, 0

    def places_after(self, ids: NDArray[np.uint64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return candidates for the places after the longest n-grams before each of `ends`."""
        hashes = np.zeros(len(ends), np.uint64)
        for offset in range(-_LONGEST, 0):
            hashes = (hashes + ids[ends + offset]) * np.uint64(_FACTOR)
        return self._tables[0][hashes >> np.uint64(self._shift)].astype(np.int64)

    def _slots(self, ids: Sequence[int], place: int) -> Iterator[tuple[NDArray[np.int32], int]]:
        """Yield each table with the slot of the n-gram before a place."""
        for size, table in zip(SIZES, self._tables, strict=True):
            value = 0
            for token_id in ids[max(0, place - size) : place]:
                value = (value + token_id) * _FACTOR & _MASK
            yield table, value >> self._shift

    def _enter_many(self, ids: Sequence[int], first: int, end: int, base: int) -> None:
        start = max(0, first - _LONGEST)
        tokens = np.array(ids[start:end], np.uint64)
        for size, table in zip(SIZES, self._tables, strict=True):
            begin = max(first, size)  # the first place with so many tokens before it
            count = end - begin
            if count <= 0:
                continue
            hashes = np.zeros(count, np.uint64)
            for offset in range(begin - size - start, begin - start):
                hashes = (hashes + tokens[offset : offset + count]) * np.uint64(_FACTOR)
            table[hashes >> np.uint64(self._shift)] = np.arange(base + begin, base + end, dtype=np.int32)


class NgramIndex:
    """Where the last tokens of a growing sequence, `ids`, stood in it before; it reads what was appended by itself.

    It is made for `num_tokens`; of a longer sequence older n-grams are found less often.
    """

    def __init__(self, ids: list[int], num_tokens: int) -> None:
        self.ids = ids
        self._tables = PlaceTables(_slots_for(min(max(num_tokens, len(ids)), 2**17)))
        self._num_entered = 0  # the n-grams before so many places are in the tables

    def find(self, ids: Sequence[int], end: int) -> tuple[int, int]:
        """Return the place of what followed the last tokens before `end`, and how many agree; (0, 0) if nothing."""
        if self._num_entered < end:
            self._tables.enter(ids, self._num_entered, end)
        found = self._tables.find(ids, end, ids)
        self._tables.enter(ids, end, end + 1)
        self._num_entered = end + 1
        return found if found[0] < end else (0, 0)  # itself, where it is asked for a second time

    def following(self, place: int, count: int) -> list[int]:
        """Return `count` tokens from a place on; at the end they begin again, so that a repetition is continued."""
        found = self.ids[place : place + count]
        while found and len(found) < count:
            found += found[: count - len(found)]
        return found

    def length_at(self, place: int, ids: Sequence[int], end: int) -> int:
        """Return how many of the last tokens before `end` stand before a place."""
        return match_length(ids, place, ids, end) if place < end else 0


class NgramPool:
    """The newest texts that were added, up to `num_bytes` in all; the oldest give way to new ones.

    Its capacity is a power of two tokens, at 12 bytes each.

    Blocks of 32 tokens that are there already are not added again, so that each turn of a dialog adds what is new.
    """

    def __init__(self, num_bytes: int) -> None:
        self._allocate(num_bytes // _ENTRY_BYTES)

    def _allocate(self, num_tokens: int) -> None:
        self._capacity = 1 << num_tokens.bit_length() - 1 if num_tokens else 0  # as a table: a slot for each token
        self._tokens = np.zeros(max(1, self._capacity), np.int32)
        self._view = self._tokens.data
        self._tables = PlaceTables(self._capacity) if self._capacity > _BLOCK else None
        self._head = 0  # where the next text goes
        self.num_tokens = 0

    @staticmethod
    def bytes_for(num_tokens: int) -> int:
        """Return the memory of a pool that holds so many tokens of one text."""
        return _ENTRY_BYTES << (num_tokens + _BLOCK).bit_length()

    @property
    def num_bytes(self) -> int:
        """What tokens and tables take at most."""
        return self._tokens.nbytes + (0 if self._tables is None else self._tables.num_bytes)

    def clear(self) -> None:
        """Give its memory back, and keep nothing from now on; places that were found in it are places of no text."""
        self._allocate(0)

    def add(self, ids: Sequence[int], start: int = 0) -> None:
        """Add a text's tokens from `start` on; of one that is longer than the pool, its end."""
        most = self._capacity - _BLOCK
        if self._tables is None or len(ids) <= start:
            return
        context = max(0, start - _LONGEST, len(ids) - most)
        text = ids[context:]
        for begin, end in self._missing(text):
            self._append(text[max(0, begin - _LONGEST) : end + 1])

    def find(self, ids: Sequence[int], end: int) -> tuple[int, int]:
        """Return the place of what followed the last tokens before `end` in a text, and how many; (0, 0) if nothing."""
        return (0, 0) if self._tables is None else self._tables.find(ids, end, self._view)

    def following(self, place: int, count: int) -> list[int]:
        """Return up to `count` tokens of a text from a place on."""
        found = self._view[place : place + count].tolist()
        return found[: found.index(_END)] if _END in found else found

    def length_at(self, place: int, ids: Sequence[int], end: int) -> int:
        """Return how many of the last tokens before `end` stand before a place."""
        return match_length(self._view, place, ids, end) if place <= len(self._view) else 0

    def _missing(self, ids: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield the begins and ends of parts that the pool does not have."""
        num_blocks = len(ids) // _BLOCK
        is_there = np.zeros(num_blocks + 1, bool)  # the rest that is no block is always added
        if num_blocks and self._tables is not None:
            tokens = np.array(ids, np.uint64)
            ends = np.arange(1, num_blocks + 1) * _BLOCK
            places = self._tables.places_after(tokens, ends - 1) + 1  # an end may have no place after it
            is_inside = (places > _BLOCK) & (places <= self._capacity)
            offsets = np.arange(-_BLOCK, 0)
            held = self._tokens[np.where(is_inside, places, _BLOCK)[:, None] + offsets]
            is_there[:-1] = is_inside & (held == tokens[ends[:, None] + offsets].astype(np.int32)).all(axis=1)
        begin = None
        for block, has in enumerate(is_there.tolist()):
            if not has and begin is None:
                begin = block * _BLOCK
            elif has and begin is not None:
                yield begin, block * _BLOCK
                begin = None
        if begin is not None and begin < len(ids):
            yield begin, len(ids)

    def _append(self, ids: Sequence[int]) -> None:
        assert self._tables is not None
        if self._head + len(ids) + 1 > self._capacity:
            self._head = 0  # what is left there stays until the next round
        start, self._head = self._head, self._head + len(ids) + 1
        self._tokens[start : self._head - 1] = ids
        self._tokens[self._head - 1] = _END
        self._tables.enter(ids, 0, len(ids), start)
        self.num_tokens = max(self.num_tokens, self._head)


def match_length(text: Text, place: int, ids: Sequence[int], end: int) -> int:
    """Return how many tokens before `ids[end]` stand before `text[place]` too, up to `MAX_MATCH`."""
    most = min(MAX_MATCH, place, end)
    for length in range(1, most + 1):
        if text[place - length] != ids[end - length]:
            return length - 1
    return most


def _slots_for(num_tokens: int) -> int:
    """Return a power of two above a number of tokens."""
    return 1 << max(6, num_tokens.bit_length())
