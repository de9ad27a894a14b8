"""Batches, and the blocks of the paged KV cache. Torch-free.

A batch describes one forward pass: a prompt, a chunk of one, a decode step, the verification of a draft, or any mixture
of them. Tokens of different sequences are packed without padding, each with its position.

The KV cache consists of blocks of slots. A sequence owns a list of blocks in the order of its positions. Several
sequences may share a block (answers to the same prompt do), so owners are counted. A shared block is never written: a
sequence that would write to it gets a copy (`BlockTable.fork`).

A block without owners may still hold a cached prefix (`engine/prefix.py`). Such blocks are free, but are reused last,
least recently used first.

Shape suffixes: M tokens of the batch, R sequences, W tokens whose logits are computed.
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
"""Default block size P in slots: a power of two that divides the 256 slots that the C kernels read at a time
(docs/decisions/0014). Results do not depend on it."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The tokens of one forward pass. Arrays are C-contiguous.

    Attributes:
        token_ids: int64 (M,).
        positions: int32 (M,); the position of each token in its sequence.
        sequences: int32 (M,); the row of `block_tables` of each token's sequence. The tokens of a sequence are
            adjacent, at consecutive positions.
        block_tables: int32 (R, blocks of the longest sequence); position p is in slot p % P of block table[p // P].
        logit_rows: int32 (W,); the tokens whose logits are computed, ascending.
        adapters: int32 (R,); index of the runner's adapter per sequence, -1 for none; None if no sequence has one.
        edits: Activation edits of each of the R sequences; None if no sequence has any.
    """

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int32]
    sequences: NDArray[np.int32]
    block_tables: NDArray[np.int32]
    logit_rows: NDArray[np.int32]
    adapters: NDArray[np.int32] | None = None
    edits: tuple[tuple[Edit, ...], ...] | None = None


class Span(NamedTuple):
    """Consecutive tokens of one sequence, at least one.

    Attributes:
        token_ids: The tokens.
        start: Position of the first token.
        blocks: The sequence's blocks, at least up to the last token's.
        num_logits: For how many of the last tokens logits are computed.
        adapter: Index of the runner's adapter, -1 for none.
        edits: Activation edits.
    """

    token_ids: Sequence[int]
    start: int
    blocks: Sequence[int]
    num_logits: int = 1
    adapter: int = -1
    edits: tuple[Edit, ...] = ()


def pack(spans: Sequence[Span], block_size: int = BLOCK_SIZE) -> Batch:
    """Pack spans of different sequences into one batch, in their order; `block_size` is the KV cache's."""
    # Nothing here releases the GIL, as np.arange does: another thread of the server would take it for milliseconds.
    tables = _tables(spans, block_size)
    has_adapters, has_edits = any(span.adapter >= 0 for span in spans), any(span.edits for span in spans)
    adapters = np.array([span.adapter for span in spans], np.int32) if has_adapters else None
    edits = tuple(span.edits for span in spans) if has_edits else None

    if all(len(span.token_ids) == span.num_logits == 1 for span in spans):  # decode only, the common case
        rows = np.array(range(len(spans)), np.int32)
        ids = np.array([span.token_ids[0] for span in spans], np.int64)
        positions = np.array([span.start for span in spans], np.int32)
        return Batch(ids, positions, rows, tables, rows, adapters, edits)

    ids, positions, sequences, logit_rows = list[int](), list[int](), list[int](), list[int]()
    for row, span in enumerate(spans):
        count = len(span.token_ids)
        ids.extend(span.token_ids)
        positions.extend(range(span.start, span.start + count))
        sequences.extend([row] * count)
        logit_rows.extend(range(len(ids) - span.num_logits, len(ids)))
    return Batch(
        np.array(ids, np.int64),
        np.array(positions, np.int32),
        np.array(sequences, np.int32),
        tables,
        np.array(logit_rows, np.int32),
        adapters,
        edits,
    )


def _tables(spans: Sequence[Span], block_size: int) -> NDArray[np.int32]:
    """Return the block tables, (R, blocks of the longest), cut after the block of each span's last token."""
    num_blocks = [(span.start + len(span.token_ids) - 1) // block_size + 1 for span in spans]
    if len(spans) == 1:
        return np.array([spans[0].blocks[: num_blocks[0]]], np.int32)
    tables = np.zeros((len(spans), max(num_blocks)), np.int32)
    for row, (span, count) in enumerate(zip(spans, num_blocks, strict=True)):
        tables[row, :count] = span.blocks[:count]
    return tables


# --- blocks of the KV cache ------------------------------------------------------------------------------------------


def blocks_for(num_tokens: int, block_size: int = BLOCK_SIZE) -> int:
    """Return how many blocks `num_tokens` tokens need."""
    return -(-num_tokens // block_size)


class BlockPool:
    """The free blocks of a KV cache, and the numbers of owners of all blocks.

    A free block is in one of two states: empty, or kept, with a cached prefix. Empty ones are at the front of the free
    list, so they are reused first; kept ones follow, least recently released first.

    Args:
        num_blocks: Number of blocks.
        block_size: Slots per block.
        forget: Called with a kept block when it is reused.
    """

    def __init__(
        self, num_blocks: int, block_size: int = BLOCK_SIZE, forget: Callable[[int], None] = lambda _: None
    ) -> None:
        self.block_size = block_size
        # lowest number first, so that the blocks of a sequence are adjacent in memory
        self._free = OrderedDict[int, None].fromkeys(range(num_blocks))
        self._owners = [0] * num_blocks
        self._forget = forget
        self._kept = set[int]()

    @property
    def num_blocks(self) -> int:
        """Total number of blocks."""
        return len(self._owners)

    @property
    def num_free(self) -> int:
        """Number of blocks without owners."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Take `count` free blocks; MemoryBudgetError, without taking any, if there are fewer."""
        if count > len(self._free):
            raise MemoryBudgetError(
                f"the KV cache needs room for {count * self.block_size} more tokens, but only "
                f"{len(self._free) * self.block_size} fit; ask for fewer tokens or answers at once"
            )
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._owners[block] = 1
            if block in self._kept:
                self._kept.remove(block)
                self._forget(block)
        return taken

    def keep(self, block: int) -> None:
        """Keep an owned block's content after its release, until the block is reused."""
        assert self._owners[block] > 0
        self._kept.add(block)

    def unkeep(self, block: int) -> None:
        """Stop keeping a block's content, because its only owner is about to overwrite it."""
        assert self._owners[block] == 1
        self._kept.remove(block)

    def num_owners(self, block: int) -> int:
        """Return the number of owners of a block."""
        return self._owners[block]

    def share(self, blocks: Sequence[int]) -> None:
        """Add an owner to blocks that are owned or kept."""
        for block in blocks:
            if self._owners[block] == 0:
                assert block in self._kept
                del self._free[block]
            self._owners[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Remove an owner from blocks; those without owners become free."""
        # The last block first, so that the beginning of a prefix, which more requests share, is reused last.
        for block in reversed(blocks):
            assert self._owners[block] > 0
            self._owners[block] -= 1
            if self._owners[block] == 0:
                self._free[block] = None
                self._free.move_to_end(block, last=block in self._kept)

    def add(self, count: int) -> None:
        """Add `count` blocks after the KV cache has grown."""
        first = len(self._owners)
        self._owners.extend([0] * count)
        self._free.update(dict.fromkeys(range(first, first + count)))


@dataclass(slots=True, eq=False)
class BlockTable:
    """The block numbers of a sequence, in the order of its positions."""

    _pool: BlockPool
    blocks: list[int] = field(default_factory=list[int])

    def reserve(self, num_tokens: int) -> None:
        """Take blocks for `num_tokens` tokens in total; MemoryBudgetError if not enough are free."""
        missing = self.missing(num_tokens)
        if missing > 0:
            self.blocks.extend(self._pool.take(missing))

    def missing(self, num_tokens: int) -> int:
        """Return how many more blocks `num_tokens` tokens in total need; negative if there are more than enough."""
        return blocks_for(num_tokens, self._pool.block_size) - len(self.blocks)

    def owners(self) -> list[int]:
        """Return the number of owners of each block."""
        return [self._pool.num_owners(block) for block in self.blocks]

    def fork(self, num_tokens: int, copy_block: Callable[[int, int], None]) -> "BlockTable":
        """Return a table for another sequence with the same first `num_tokens` tokens.

        Whole blocks are shared. A partially filled last block is copied with the cache's `copy_block(source, target)`.

        Raises:
            MemoryBudgetError: If no block is free for the copy.
        """
        table = BlockTable(self._pool)
        num_whole, rest = divmod(num_tokens, self._pool.block_size)
        table.share(self.blocks[:num_whole])
        if rest:
            try:
                table.copy(self.blocks[num_whole], copy_block)
            except BaseException:
                table.release()
                raise
        return table

    def share(self, blocks: Sequence[int]) -> None:
        """Append blocks that another sequence has computed."""
        self._pool.share(blocks)
        self.blocks.extend(blocks)

    def copy(self, source: int, copy_block: Callable[[int, int], None]) -> None:
        """Append a copy of a block that is owned or kept; MemoryBudgetError if no block is free for it."""
        self._pool.share([source])  # so that it is not reused for the copy itself
        try:
            (target,) = self._pool.take(1)
            self.blocks.append(target)
            copy_block(source, target)
        finally:
            self._pool.release([source])

    def release(self) -> None:
        """Release all blocks."""
        self._pool.release(self.blocks)
        self.blocks = []
