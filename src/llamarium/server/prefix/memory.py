"""The earlier prompts of a server, as digests and prefix keys, bounded in bytes; each is found for its own key only."""

import sys
import threading
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from llamarium.engine.prefix import Key
from llamarium.server.prefix.fields import Field, exact_digests, unpack

BYTES_PER_BLOCK = 64
"""Of the memory of earlier prompts, for each block of the prefix cache."""

MAX_COMPARED = 128
"""Prompts of one key that a new one is compared with, the newest first."""

_KEY_BYTES = 16
_OVERHEAD_BYTES = 400  # of a record besides its arrays: the object, its place in two dictionaries, and their headers


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """An earlier prompt and its answer.

    Attributes:
        owner: A digest of the API key.
        root: The prefix key before its first block.
        keys: The prefix keys of its whole blocks, one after the other.
        tail: The ids of its tokens after these.
        num_prompt: How many of its tokens were the prompt's.
        packed: Its fields, the answer's after the prompt's.
        num_prompt_fields: How many of them were the prompt's.
    """

    owner: Key
    root: Key
    keys: bytes
    tail: "array[int]"
    num_prompt: int
    packed: bytes
    num_prompt_fields: int
    _exact: "array[int]" = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_exact", array("Q", exact_digests(self.packed)))

    @classmethod
    def of(
        cls,
        owner: Key,
        root: Key,
        keys: Sequence[Key],
        tail: Sequence[int],
        num_prompt: int,
        packed: bytes,
        num_prompt_fields: int,
    ) -> "PromptRecord":
        """Return a record of a prompt's keys, its last tokens and its packed fields."""
        return cls(owner, root, b"".join(keys), array("i", tail), num_prompt, packed, num_prompt_fields)

    @property
    def fields(self) -> list[Field]:
        """Its fields."""
        return unpack(self.packed)

    @property
    def num_blocks(self) -> int:
        """Whole blocks."""
        return len(self.keys) // _KEY_BYTES

    def key(self, block: int) -> Key:
        """Return the prefix key of a whole block."""
        return self.keys[block * _KEY_BYTES : (block + 1) * _KEY_BYTES]

    def num_common_blocks(self, keys: bytes) -> int:
        """Return how many blocks it shares with a prompt whose keys are given one after the other."""
        low, high = 0, min(len(keys), len(self.keys)) // _KEY_BYTES
        while low < high:  # a key is a hash of all tokens up to its block's end
            middle = (low + high + 1) // 2
            end = middle * _KEY_BYTES
            if self.keys[end - _KEY_BYTES : end] == keys[end - _KEY_BYTES : end]:
                low = middle
            else:
                high = middle - 1
        return low

    def similarity(self, exact: set[int]) -> int:
        """Return how many of a prompt's values it has, given their digests."""
        return len(exact.intersection(self._exact))

    def is_beginning_of(self, other: "PromptRecord") -> bool:
        """Whether another record has all of its blocks and fields, so that it tells nothing more."""
        return (
            (self.owner, self.root) == (other.owner, other.root)
            and other.packed.startswith(self.packed)
            and other.keys.startswith(self.keys)
            and (self.num_blocks < other.num_blocks or other.tail[: len(self.tail)] == self.tail)
        )

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        parts = (self.keys, self.tail, self.packed, self._exact)
        return _OVERHEAD_BYTES + sum(map(sys.getsizeof, parts))


class PromptMemory:
    """The newest earlier prompts, of `max_bytes` in all; any thread may use it."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._lock = max_bytes, threading.Lock()
        self._records = dict[int, PromptRecord]()  # by age, the oldest first
        self._of_owner = dict[Key, dict[int, None]]()
        self._next = 0
        self.num_bytes = 0

    def newest(self, owner: Key) -> list[PromptRecord]:
        """Return the newest prompts of a key, the newest first."""
        with self._lock:
            return [self._records[number] for number in self._newest(owner)]

    def add(self, record: PromptRecord) -> None:
        """Keep a prompt; those that are its beginning, and the oldest beyond the bound, are forgotten."""
        size = record.num_bytes
        if size > self._max_bytes:
            return
        with self._lock:
            for number in list(self._newest(record.owner)):
                if self._records[number].is_beginning_of(record):
                    self._forget(number)
            while self.num_bytes + size > self._max_bytes:
                self._forget(next(iter(self._records)))
            self._records[self._next] = record
            self._of_owner.setdefault(record.owner, {})[self._next] = None
            self._next += 1
            self.num_bytes += size

    def _newest(self, owner: Key) -> Iterator[int]:
        return islice(reversed(self._of_owner.get(owner, {})), MAX_COMPARED)

    def _forget(self, number: int) -> None:
        record = self._records.pop(number)
        self.num_bytes -= record.num_bytes
        numbers = self._of_owner[record.owner]
        del numbers[number]
        if not numbers:
            del self._of_owner[record.owner]
