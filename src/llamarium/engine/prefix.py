"""The prefix cache: finds the blocks that hold the beginning of a prompt, so that it is computed once. Never torch.

A block's key is a hash of everything that its keys and values depend on: the tokens in it, the key of the block before
it, and at the root whatever else changes them (the adapter, a salt; model, rotation and dtype are one engine's own). A
hit also compares the tokens. Of a block that is shared in part only, its new owner gets a copy.
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

_MAX_COMPARED = 64  # candidate blocks with the same parent and first token


@dataclass(frozen=True, slots=True)
class Match:
    """The cached beginning of a prompt: whole blocks and their keys.

    Attributes:
        partial: A block whose first tokens continue them, or None.
        num_partial: How many of its tokens do.
        is_all: Whether it holds no others.
        missing: The key of the prompt's first whole block that is not cached, or None.
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


def root_key(*what: object) -> Key:
    """Return the key before a sequence's first block: a hash of all but tokens that changes its keys and values."""
    return hashlib.blake2b(repr(what).encode(), digest_size=16).digest()


def block_key(parent: Key, ids: Sequence[int]) -> Key:
    """Return the key of a block with these tokens, after the block with the key `parent`."""
    return hashlib.blake2b(parent + np.array(ids, np.int64).tobytes(), digest_size=16).digest()


def block_keys(root: Key, ids: Sequence[int], block_size: int) -> list[Key]:
    """Return the keys of all whole blocks of a sequence after `root`."""
    packed, keys, parent = np.array(ids, np.int64).tobytes(), list[Key](), root
    width = 8 * block_size
    for start in range(0, len(packed) - width + 1, width):
        parent = hashlib.blake2b(parent + packed[start : start + width], digest_size=16).digest()
        keys.append(parent)
    return keys


class PrefixIndex:
    """Finds the blocks that hold the beginning of a prompt, among the `num_blocks` of its `pool`.

    Whole ones are also kept on `disk`, if there is one.
    """

    def __init__(self, num_blocks: int, block_size: int, disk: DiskTier | None = None) -> None:
        self.pool, self.disk = BlockPool(num_blocks, block_size, self._forget), disk
        self._contents: dict[int, _Content] = {}
        self._blocks: dict[Key, int] = {}
        self._children: defaultdict[tuple[Key, int], dict[int, None]] = defaultdict(dict)  # by parent and first token

    def find(self, root: Key, ids: Sequence[int]) -> Match:
        """Return the cached beginning of `ids`; the caller owns none of the blocks yet."""
        size = self.pool.block_size
        blocks, keys, parent = list[int](), list[Key](), root
        for start in range(0, len(ids), size):
            part = tuple(ids[start : start + size])
            key = block_key(parent, part)
            block = self._blocks.get(key)
            if block is None or len(part) < size or self._contents[block].ids != part:
                return Match(blocks, keys, *self._longest(parent, part), key if len(part) == size else None)
            blocks.append(block)
            keys.append(key)
            parent = key
        return Match(blocks, keys)

    def ids_of(self, key: Key) -> tuple[int, ...] | None:
        """Return the tokens of a cached block, or None if it is not in memory; any thread may call this."""
        block = self._blocks.get(key)
        content = None if block is None else self._contents.get(block)
        return content.ids if content is not None and content.key == key else None  # it may just have been replaced

    def is_on_disk(self, found: Match) -> bool:
        """Whether the next block after a match is on disk, as far as is known; the match counts as used there, too."""
        if found.keys:
            self.touch(found.keys[-1])
        return self.disk is not None and found.missing in self.disk

    def touch(self, key: Key) -> None:
        """Note that a block, and all before it, were used, also if they are on disk."""
        if self.disk is not None:
            self.disk.touch(key)

    def load(self, parent: Key, block: int, ids: Sequence[int]) -> bool:
        """Fill an owned block from disk, and return whether it was there; if not, its content is lost."""
        return self.disk is not None and self.disk.load(block, block_key(parent, ids), parent, ids)

    def enter(self, parent: Key, block: int, ids: Sequence[int]) -> Key:
        """Note a block's tokens, and return its key; a second block with the same content is not noted.

        `parent` is the key of the block before it, or the root's. The block is owned, and its tokens' slots will not be
        written again; there are fewer than its slots only if it is a sequence's last.
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
        """Drop a block from the prefix cache, as its only owner is going to write to it."""
        self.pool.unkeep(block)
        self._forget(block)

    def _longest(self, parent: Key, ids: tuple[int, ...]) -> tuple[int | None, int, bool]:
        """Return the block after `parent` with the most first tokens in common, how many, and if it holds no others.

        Of equals the newest, and of many with the same first token only the newest are compared: a miss costs less than
        looking at thousands of blocks.
        """
        best, most = None, 0
        for block in islice(reversed(self._children.get((parent, ids[0]), {})), _MAX_COMPARED):
            pairs = zip(self._contents[block].ids, ids, strict=False)
            count = next((i for i, (kept, sought) in enumerate(pairs) if kept != sought), None)
            if count is None:
                count = min(len(self._contents[block].ids), len(ids))
            if count > most:
                best, most = block, count
        return best, most, best is not None and most == len(self._contents[best].ids)

    def _forget(self, block: int) -> None:
        content = self._contents.pop(block)
        del self._blocks[content.key]
        place = content.parent, content.ids[0]
        del self._children[place][block]
        if not self._children[place]:
            del self._children[place]
