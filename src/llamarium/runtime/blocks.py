"""The free blocks of a cache, and the blocks of each sequence. Never torch.

A cache is a number of blocks of slots. A sequence has a list of them, in the order of its positions. A block may belong
to several sequences (the answers to one prompt share its keys and values), so owners are counted. A shared block is
never written: a sequence that would gets a copy of its own (`BlockTable.fork`).

A block without owners may still hold keys and values of use (`engine/prefix.py`). Such blocks are free, but taken last,
the least recently used one first.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from llamarium.errors import MemoryBudgetError
from llamarium.runtime.batch import BLOCK_SIZE


def blocks_for(num_tokens: int, block_size: int = BLOCK_SIZE) -> int:
    """Return how many blocks so many tokens need."""
    return -(-num_tokens // block_size)


class BlockPool:
    """The free blocks of a cache, and how many owners the others have.

    `forget` is called with a kept block when it is taken for something else.
    """

    def __init__(
        self, num_blocks: int, block_size: int = BLOCK_SIZE, forget: Callable[[int], None] = lambda _: None
    ) -> None:
        self.block_size = block_size
        # the lowest first, so that a sequence's blocks lie side by side
        self._free = OrderedDict[int, None].fromkeys(range(num_blocks))
        self._owners = [0] * num_blocks
        self._forget = forget
        self._kept = set[int]()

    @property
    def num_blocks(self) -> int:
        """All blocks, free or not."""
        return len(self._owners)

    @property
    def num_free(self) -> int:
        """Blocks without owners."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Take free blocks; MemoryBudgetError if there are not as many; none is taken then."""
        if count > len(self._free):
            raise MemoryBudgetError(
                f"{count * self.block_size} more positions of keys and values are needed, and the cache has room for "
                f"{len(self._free) * self.block_size}; ask for fewer tokens or answers at once"
            )
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._owners[block] = 1
            if block in self._kept:
                self._kept.remove(block)
                self._forget(block)
        return taken

    def keep(self, block: int) -> None:
        """Keep a block's content as long as possible; `forget` is called when it is taken for something else."""
        assert self._owners[block] > 0
        self._kept.add(block)

    def unkeep(self, block: int) -> None:
        """Drop a block from those kept; its owner will overwrite it."""
        assert self._owners[block] == 1
        self._kept.remove(block)

    def num_owners(self, block: int) -> int:
        """Return how many sequences have a block."""
        return self._owners[block]

    def share(self, blocks: Sequence[int]) -> None:
        """Count one more owner of blocks that are owned or kept."""
        for block in blocks:
            if self._owners[block] == 0:
                assert block in self._kept
                del self._free[block]
            self._owners[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Count one owner less of blocks, the last one first; those without owners are free."""
        for block in reversed(blocks):
            assert self._owners[block] > 0
            self._owners[block] -= 1
            if self._owners[block] == 0:
                self._free[block] = None
                self._free.move_to_end(block, last=block in self._kept)

    def add(self, count: int) -> None:
        """Add the new blocks of a cache that has grown."""
        first = len(self._owners)
        self._owners.extend([0] * count)
        self._free.update(dict.fromkeys(range(first, first + count)))


@dataclass(slots=True, eq=False)
class BlockTable:
    """One sequence's `blocks`, by number, in the order of positions."""

    _pool: BlockPool
    blocks: list[int] = field(default_factory=list[int])

    def reserve(self, num_tokens: int) -> None:
        """Take blocks for so many tokens in all; MemoryBudgetError if the cache has not as many free blocks."""
        missing = self.missing(num_tokens)
        if missing > 0:
            self.blocks.extend(self._pool.take(missing))

    def missing(self, num_tokens: int) -> int:
        """Return how many blocks more so many tokens in all need; negative if there are more than enough."""
        return blocks_for(num_tokens, self._pool.block_size) - len(self.blocks)

    def owners(self) -> list[int]:
        """Return the number of owners of each block."""
        return [self._pool.num_owners(block) for block in self.blocks]

    def fork(self, num_tokens: int, copy_block: Callable[[int, int], None]) -> "BlockTable":
        """Return the table of another sequence with the same first tokens, whose whole blocks are shared.

        The rest's block is copied by the cache's `copy_block`, called with source and target. MemoryBudgetError if
        there is no block for the copy.
        """
        other = BlockTable(self._pool)
        whole, rest = divmod(num_tokens, self._pool.block_size)
        other.share(self.blocks[:whole])
        if rest:
            try:
                other.copy(self.blocks[whole], copy_block)
            except BaseException:
                other.release()
                raise
        return other

    def share(self, blocks: Sequence[int]) -> None:
        """Append blocks that another sequence has filled."""
        self._pool.share(blocks)
        self.blocks.extend(blocks)

    def copy(self, source: int, copy_block: Callable[[int, int], None]) -> None:
        """Append a copy of a block that is owned or kept; MemoryBudgetError if there is no block for the copy."""
        self._pool.share([source])  # so that it is not taken for the copy itself
        try:
            (target,) = self._pool.take(1)
            self.blocks.append(target)
            copy_block(source, target)
        finally:
            self._pool.release([source])

    def release(self) -> None:
        """Give all blocks back."""
        self._pool.release(self.blocks)
        self.blocks = []
