"""The one description of a step of work: some tokens of some sequences, and where their past lies. Never torch.

A prompt, a chunk of it, a decode step, a speculative check and any mixture of them are batches; nothing else describes
them. Tokens are packed, without padding; positions are data; a sequence's past is a list of blocks of the cache.

Shape suffixes: M tokens of the batch, R sequences, W tokens whose logits are wanted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

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
