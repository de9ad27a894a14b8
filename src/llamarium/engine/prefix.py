"""Prefix caching: find the KV cache blocks that already hold the beginning of a prompt. Torch-free.

A block's key is a hash of everything that its keys and values depend on: its tokens, the key of the previous block
and, at the root, the adapter and the request's salt. Model, RoPE and dtype are constant within an engine, so they are
not part of it. A hit also compares the tokens, so a hash collision is only a miss. If only the first tokens of a block
match, the new sequence gets a copy of it.
"""

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from llamarium.engine.tiers.disk_tier import DiskTier
from llamarium.runtime.batch import BlockPool

Key = bytes

_MAX_COMPARED = 64  # candidates for a partial match: blocks with the same parent and first token


@dataclass(frozen=True, slots=True)
class Match:
    """The cached prefix of a prompt.

    Attributes:
        blocks: Whole blocks, in order.
        keys: Their keys.
        partial: A block whose first tokens continue the prefix, or None.
        num_partial: Number of tokens of `partial` that match.
        is_all: True if `partial` holds no other tokens.
        missing: Key of the first whole block that is not cached, or None.
    """

    blocks: list[int]
    keys: list[Key]
    partial: int | None = None
    num_partial: int = 0
    is_all: bool = False
    missing: Key | None = None


@dataclass(frozen=True, slots=True)
class _Content:
    parent: Key
    ids: tuple[int, ...]
    key: Key


def root_key(*parts: object) -> Key:
    """Return the key before a sequence's first block: a hash of what its keys and values depend on besides tokens."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()


def block_key(parent: Key, ids: Sequence[int]) -> Key:
    """Return the key of a block with the tokens `ids` that follows the block with key `parent`."""
    return hashlib.blake2b(parent + np.array(ids, np.int64).tobytes(), digest_size=16).digest()


def block_keys(root: Key, ids: Sequence[int], block_size: int) -> list[Key]:
    """Return the keys of all whole blocks of a sequence; `root` is the key before the first."""
    packed, keys, parent = np.array(ids, np.int64).tobytes(), list[Key](), root
    width = 8 * block_size
    for start in range(0, len(packed) - width + 1, width):
        parent = hashlib.blake2b(parent + packed[start : start + width], digest_size=16).digest()
        keys.append(parent)
    return keys


class PrefixIndex:
    """An index of cached blocks by content, and the `pool` that they belong to; whole blocks also go to `disk`."""

    def __init__(self, num_blocks: int, block_size: int, disk: DiskTier | None = None) -> None:
        self.pool, self.disk = BlockPool(num_blocks, block_size, self._forget), disk
        self._contents: dict[int, _Content] = {}
        self._blocks: dict[Key, int] = {}
        self._children: defaultdict[tuple[Key, int], dict[int, None]] = defaultdict(dict)  # by parent and first token

    def find(self, root: Key, ids: Sequence[int]) -> Match:
        """Return the longest cached prefix of `ids`; the caller does not own its blocks yet."""
        size = self.pool.block_size
        blocks, keys, parent = list[int](), list[Key](), root
        for start in range(0, len(ids), size):
            block_ids = tuple(ids[start : start + size])
            key = block_key(parent, block_ids)
            block = self._blocks.get(key)
            if block is None or len(block_ids) < size or self._contents[block].ids != block_ids:
                return Match(blocks, keys, *self._longest(parent, block_ids), key if len(block_ids) == size else None)
            blocks.append(block)
            keys.append(key)
            parent = key
        return Match(blocks, keys)

    def ids_of(self, key: Key) -> tuple[int, ...] | None:
        """Return the tokens of a cached block, or None if it is not in memory. Any thread may call this."""
        block = self._blocks.get(key)
        content = None if block is None else self._contents.get(block)
        # The engine's thread may have reused the block between the two look-ups.
        return content.ids if content is not None and content.key == key else None

    def is_on_disk(self, match: Match) -> bool:
        """Return whether the block after a match is on disk, and mark the match as used there."""
        if match.keys:
            self.touch(match.keys[-1])
        return self.disk is not None and match.missing in self.disk

    def touch(self, key: Key) -> None:
        """Mark a block and its ancestors as recently used on disk."""
        if self.disk is not None:
            self.disk.touch(key)

    def load(self, parent: Key, block: int, ids: Sequence[int]) -> bool:
        """Read an owned block from disk; return False on a miss, which leaves its content undefined."""
        return self.disk is not None and self.disk.load(block, block_key(parent, ids), parent, ids)

    def enter(self, parent: Key, block: int, ids: Sequence[int]) -> Key:
        """Add a block to the index and return its key; a duplicate of an indexed block is not added.

        The block must have an owner, and the slots of its tokens must not be written again. Only the last block of a
        sequence may hold fewer tokens than slots.

        Args:
            parent: Key of the previous block, or the root key.
            block: Number of the block.
            ids: Its tokens.
        """
        content = _Content(parent, tuple(ids), block_key(parent, ids))
        if content.key not in self._blocks and block not in self._contents:
            self.pool.keep(block)
            self._contents[block] = content
            self._blocks[content.key] = block
            self._children[parent, content.ids[0]][block] = None
            if self.disk is not None and len(ids) == self.pool.block_size:
                self.disk.save(block, content.key, parent, ids, lambda: self._contents.get(block) is content)
        return content.key

    def take_out(self, block: int) -> None:
        """Remove a block from the index, because its only owner is about to write to it."""
        self.pool.unkeep(block)
        self._forget(block)

    def _longest(self, parent: Key, ids: tuple[int, ...]) -> tuple[int | None, int, bool]:
        """Return the block after `parent` that shares the most leading tokens, how many, and if it holds no others.

        The newest block wins a tie. Only the newest `_MAX_COMPARED` are compared: missing a longer match costs less
        than searching thousands of blocks.
        """
        best, best_count = None, 0
        for block in islice(reversed(self._children.get((parent, ids[0]), {})), _MAX_COMPARED):
            pairs = zip(self._contents[block].ids, ids, strict=False)
            count = next((i for i, (cached_id, token_id) in enumerate(pairs) if cached_id != token_id), None)
            if count is None:
                count = min(len(self._contents[block].ids), len(ids))
            if count > best_count:
                best, best_count = block, count
        return best, best_count, best is not None and best_count == len(self._contents[best].ids)

    def _forget(self, block: int) -> None:
        content = self._contents.pop(block)
        del self._blocks[content.key]
        siblings = content.parent, content.ids[0]
        del self._children[siblings][block]
        if not self._children[siblings]:
            del self._children[siblings]
