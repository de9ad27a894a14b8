"""The one description of a step of work: some tokens of some sequences, and where their past lies. Never torch.

A prompt, a chunk of it, a decode step, a speculative check and any mixture of them are batches; nothing else describes
them. Tokens are packed, without padding; positions are data; a sequence's past is a list of blocks of the cache.

A cache is a number of blocks of slots. A sequence has a list of them, in the order of its positions. A block may belong
to several sequences (the answers to one prompt share its keys and values), so owners are counted. A shared block is
never written: a sequence that would gets a copy of its own (`BlockTable.fork`).

A block without owners may still hold keys and values of use (`engine/prefix.py`). Such blocks are free, but taken last,
the least recently used one first.

Shape suffixes: M tokens of the batch, R sequences, W tokens whose logits are wanted.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamarium.errors import MemoryBudgetError
from llamarium.runtime.intervention import Edit

BLOCK_SIZE = 128
"""P, the tokens of a block of the cache, where nothing else is asked for: a power of two that divides the 256 slots of
C's KV chunks (docs/decisions/0014). No result depends on it."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A step of work. Arrays are C-contiguous.

    Attributes:
        token_ids: int64 (M,).
        positions: int32 (M,); where each token stands in its own sequence.
        sequences: int32 (M,); the row of `block_tables` that is its sequence's. The tokens of a sequence follow each
            other, and so do their positions.
        block_tables: int32 (R, blocks of the longest); position p lies in block table[p // P], slot p % P.
        logit_rows: int32 (W,); the tokens whose logits are wanted, ascending.
        adapters: int32 (R,); which of the runner's adapters each sequence uses, -1 for none; None where none uses any.
        edits: R of them: of each sequence, in order; None where none has any.
    """

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int32]
    sequences: NDArray[np.int32]
    block_tables: NDArray[np.int32]
    logit_rows: NDArray[np.int32]
    adapters: NDArray[np.int32] | None = None
    edits: tuple[tuple[Edit, ...], ...] | None = None


class Span(NamedTuple):
    """Tokens of one sequence that follow each other, at least one.

    Attributes:
        start: The first one's position.
        blocks: The sequence's blocks, enough for the last one's position.
        num_logits: Of how many of them, the last ones, the logits are wanted.
        adapter: Which of the runner's adapters is used, -1 for none.
        edits: Of what the model computes for them.
    """

    token_ids: Sequence[int]
    start: int
    blocks: Sequence[int]
    num_logits: int = 1
    adapter: int = -1
    edits: tuple[Edit, ...] = ()


def pack(spans: Sequence[Span], block_size: int = BLOCK_SIZE) -> Batch:
    """Put spans of different sequences into one batch, in their order; `block_size` is the cache's.

    It calls nothing that releases the GIL, as np.arange does: a server's thread would take it.
    """
    tables = _tables(spans, block_size)
    has_adapters, has_edits = any(span.adapter >= 0 for span in spans), any(span.edits for span in spans)
    adapters = np.array([span.adapter for span in spans], np.int32) if has_adapters else None
    edits = tuple(span.edits for span in spans) if has_edits else None

    if all(len(span.token_ids) == span.num_logits == 1 for span in spans):  # as in most batches
        rows = np.array(range(len(spans)), np.int32)
        ids = np.array([span.token_ids[0] for span in spans], np.int64)
        positions = np.array([span.start for span in spans], np.int32)
        return Batch(ids, positions, rows, tables, rows, adapters, edits)

    ids, positions, sequences, wanted = list[int](), list[int](), list[int](), list[int]()
    for row, span in enumerate(spans):
        count = len(span.token_ids)
        ids.extend(span.token_ids)
        positions.extend(range(span.start, span.start + count))
        sequences.extend([row] * count)
        wanted.extend(range(len(ids) - span.num_logits, len(ids)))
    return Batch(
        np.array(ids, np.int64),
        np.array(positions, np.int32),
        np.array(sequences, np.int32),
        tables,
        np.array(wanted, np.int32),
        adapters,
        edits,
    )


def _tables(spans: Sequence[Span], block_size: int) -> NDArray[np.int32]:
    """Return the block tables, (R, blocks of the longest), as long as the spans' last positions need."""
    needed = [(span.start + len(span.token_ids) - 1) // block_size + 1 for span in spans]
    if len(spans) == 1:
        return np.array([spans[0].blocks[: needed[0]]], np.int32)
    tables = np.zeros((len(spans), max(needed)), np.int32)
    for row, (span, count) in enumerate(zip(spans, needed, strict=True)):
        tables[row, :count] = span.blocks[:count]
    return tables


# --- the blocks of a cache -------------------------------------------------------------------------------------------


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
