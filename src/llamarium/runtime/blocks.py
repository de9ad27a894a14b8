"""Which blocks of a cache belong to whom. Never torch.

A cache is a number of blocks of `BLOCK_SIZE` slots. A sequence has a list of them, in the order of its positions. A
block may belong to several sequences (the answers to one prompt share its keys and values), so owners are counted; one
that is shared is never written to: a sequence that would gets a copy of its own (`BlockTable.fork`).
"""

from collections.abc import Callable, Sequence

from llamarium.errors import MemoryBudgetError
from llamarium.runtime.batch import BLOCK_SIZE


def blocks_for(num_tokens: int) -> int:
    """Return how many blocks so many tokens need."""
    return -(-num_tokens // BLOCK_SIZE)


class BlockPool:
    """The free blocks of a cache, and how many owners the others have.

    Args:
        num_blocks: Of the cache.
    """

    def __init__(self, num_blocks: int) -> None:
        self._free = list(range(num_blocks))[::-1]  # the lowest first, so that a sequence's blocks lie side by side
        self._owners = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that nobody has."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Take free blocks.

        Raises:
            MemoryBudgetError: If there are not as many; none is taken then.
        """
        if count > len(self._free):
            raise MemoryBudgetError(
                f"{count * BLOCK_SIZE} more positions of keys and values are needed, and the cache has room for "
                f"{len(self._free) * BLOCK_SIZE}; ask for fewer tokens or answers at once"
            )
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._owners[block] = 1
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """Count one more owner of blocks that somebody has."""
        for block in blocks:
            assert self._owners[block] > 0
            self._owners[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Give blocks back; one that nobody has any more is free."""
        for block in reversed(blocks):
            assert self._owners[block] > 0
            self._owners[block] -= 1
            if self._owners[block] == 0:
                self._free.append(block)

    def add(self, count: int) -> None:
        """Note that the cache has become so many blocks larger."""
        first = len(self._owners)
        self._owners.extend([0] * count)
        self._free[:0] = range(first + count - 1, first - 1, -1)


class BlockTable:
    """One sequence's blocks.

    Attributes:
        blocks: Their numbers, in the order of positions.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.blocks: list[int] = []
        self._pool = pool

    def reserve(self, num_tokens: int) -> None:
        """Have room for so many tokens in all.

        Raises:
            MemoryBudgetError: If the cache has not as many free blocks.
        """
        missing = blocks_for(num_tokens) - len(self.blocks)
        if missing > 0:
            self.blocks.extend(self._pool.take(missing))

    def fork(self, num_tokens: int, copy_block: Callable[[int, int], None]) -> "BlockTable":
        """Return the table of another sequence with the same first tokens.

        Args:
            num_tokens: How many; their whole blocks are shared, and of the rest's block it gets a copy.
            copy_block: The cache's; called with source and target.

        Raises:
            MemoryBudgetError: If there is no block for the copy.
        """
        other, whole = BlockTable(self._pool), num_tokens // BLOCK_SIZE
        if num_tokens % BLOCK_SIZE:
            copies = self._pool.take(1)
            try:
                copy_block(self.blocks[whole], copies[0])
            except BaseException:
                self._pool.release(copies)
                raise
        else:
            copies = []
        self._pool.share(self.blocks[:whole])
        other.blocks = [*self.blocks[:whole], *copies]
        return other

    def release(self) -> None:
        """Give all blocks back."""
        self._pool.release(self.blocks)
        self.blocks = []
