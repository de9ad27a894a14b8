"""Forward passes over single texts, for inspection; `llamarium.engine` serves requests. Torch-free.

A sequence records its ids and how many of them have been computed. `advance` computes the others, whether that is a
prompt or the last sampled token. `logits_of` runs a whole text and yields its logits a few positions at a time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from llamarium.inspect.numbers import Floats, as_array
from llamarium.runtime.batch import BLOCK_SIZE, Batch, BlockPool, BlockTable, Span, blocks_for, pack
from llamarium.runtime.runner import Cache, CacheDtype, Logits, Runner

PREFILL_CHUNK = 2048  # tokens per batch; bounds the memory of activations, and does not change results
CHUNK_BYTES = 64 * 2**20
"""Maximum size of the logits in memory at a time."""


@dataclass(slots=True)
class KeptSequence:
    """A sequence with its part of a KV cache; the caller appends sampled tokens to `ids`.

    Attributes:
        ids: Token ids.
        table: Its blocks of the KV cache.
        num_computed: Number of tokens that have been computed.
        adapter: Index of the runner's adapter, -1 for none.
    """

    ids: list[int]
    table: BlockTable
    num_computed: int = 0
    adapter: int = -1


class Memory:
    """A KV cache with room for `num_tokens`; each sequence takes whole blocks."""

    def __init__(self, runner: Runner, num_tokens: int = 0, dtype: CacheDtype = "auto") -> None:
        num_blocks = blocks_for(num_tokens)
        self.dtype = dtype
        self.cache: Cache = runner.new_cache(num_blocks, dtype)
        self._pool = BlockPool(num_blocks)

    def begin(self, ids: Sequence[int], num_tokens: int = 0, adapter: int = -1) -> KeptSequence:
        """Return a new sequence with room for `num_tokens`; MemoryBudgetError if there are not enough free blocks."""
        table = BlockTable(self._pool)
        table.reserve(num_tokens)
        return KeptSequence(list(ids), table, adapter=adapter)

    def change(self, sequence: KeptSequence, ids: Sequence[int]) -> None:
        """Replace a sequence's ids, keeping what is computed for the common prefix; the cache grows if needed.

        MemoryBudgetError if there is not enough memory; the sequence is unchanged then.
        """
        missing = sequence.table.missing(len(ids)) - self._pool.num_free
        if missing > 0:
            self.cache.grow(self.cache.num_blocks + max(missing, self.cache.num_blocks // 4))  # for more tokens
            self._pool.add(self.cache.num_blocks - self._pool.num_blocks)
        sequence.table.reserve(len(ids))
        sequence.num_computed = min(sequence.num_computed, num_shared(sequence.ids, ids))
        sequence.ids = list(ids)


def advance(runner: Runner, cache: Cache, sequences: Sequence[KeptSequence], chunk: int = PREFILL_CHUNK) -> Logits:
    """Compute the remaining tokens of each sequence and return the logits of their last tokens, (B, V).

    There must be at least one sequence, and each must have a token that is not computed. `chunk` does not change the
    results.
    """
    parts = [runner.run(batch, cache) for batch in batches(sequences, chunk)]
    return parts[0] if len(parts) == 1 else _join(parts)


def batches(sequences: Sequence[KeptSequence], chunk: int = PREFILL_CHUNK) -> Iterator[Batch]:
    """Yield the batches that compute the remaining tokens of sequences, with logits for each sequence's last token.

    `num_computed` is updated when the next batch is requested, so the caller must run each batch first.
    """
    spans, ends, room = list[Span](), list[tuple[KeptSequence, int]](), chunk
    for sequence in sequences:
        start = sequence.num_computed
        while start < (count := len(sequence.ids)):
            end = min(count, start + room)
            ids, blocks = sequence.ids[start:end], sequence.table.blocks
            spans.append(Span(ids, start, blocks, num_logits=int(end == count), adapter=sequence.adapter))
            ends.append((sequence, end))
            room, start = room - (end - start), end
            if room == 0:
                yield pack(spans)
                _count(ends)
                spans, ends, room = [], [], chunk
    if spans:
        yield pack(spans)
        _count(ends)


def num_shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common prefix of two token sequences."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def num_rows(vocab_size: int, itemsize: int = 4) -> int:
    """Return the number of rows of logits that fit into `CHUNK_BYTES`, at least 1."""
    return max(1, CHUNK_BYTES // (itemsize * vocab_size))


def logits_of(runner: Runner, ids: Sequence[int], num_logits: int | None = None) -> Iterator[Floats]:
    """Run a text and yield the logits of its last `num_logits` tokens (None: all), in float32 parts (C, V)."""
    first = len(ids) - (len(ids) if num_logits is None else num_logits)
    memory = Memory(runner, len(ids))
    blocks = memory.begin(ids, len(ids)).table.blocks
    for start in range(0, first, PREFILL_CHUNK):
        part = ids[start : min(start + PREFILL_CHUNK, first)]
        runner.run(pack([Span(part, start, blocks, num_logits=0)]), memory.cache)
    step = num_rows(runner.config.vocab_size)
    for start in range(first, len(ids), step):
        part = ids[start : start + step]
        span = Span(part, start, blocks, num_logits=len(part))
        yield as_array(runner.run(pack([span]), memory.cache))


def rows_logits(runner: Runner, rows: Sequence[Sequence[int]], num_logits: Sequence[int]) -> list[Floats]:
    """Run texts as one batch and return the logits of the last tokens of each, float32 (number of logits, V).

    Args:
        runner: Executes the model.
        rows: Token ids of each text, at least one.
        num_logits: Number of last tokens per text, up to `num_rows` in total.
    """
    memory = Memory(runner, sum(blocks_for(len(ids)) for ids in rows) * BLOCK_SIZE)
    spans = [
        Span(ids, 0, memory.begin(ids, len(ids)).table.blocks, num_logits=count)
        for ids, count in zip(rows, num_logits, strict=True)
    ]
    return np.split(as_array(runner.run(pack(spans), memory.cache)), np.cumsum(num_logits)[:-1])


def _count(ends: Sequence[tuple[KeptSequence, int]]) -> None:
    """Update `num_computed` of sequences; called after their batch, so that it is correct after an interruption."""
    for sequence, end in ends:
        sequence.num_computed = end


def _join(parts: Sequence[Logits]) -> Logits:
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(cast("list[np.ndarray[Any, Any]]", parts))
    import torch

    return torch.cat(parts)  # pyright: ignore[reportArgumentType]
