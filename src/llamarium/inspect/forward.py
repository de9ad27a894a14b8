"""Forward passes over texts, for looking at them one by one; answers come from `llamarium.engine`. Never torch.

A sequence has its ids and the number of those that have been run; the next `advance` runs the others, be it a prompt or
the token that was chosen last. `logits_of` runs a whole text, and yields its logits a few positions at a time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from llamarium.inspect.numbers import Floats, as_array
from llamarium.runtime.batch import BLOCK_SIZE, Batch, BlockPool, BlockTable, Span, blocks_for, pack
from llamarium.runtime.runner import Cache, CacheDtype, Logits, Runner

PREFILL_CHUNK = 2048  # tokens of a batch: bounds the activations of long prompts, not what is computed
CHUNK_BYTES = 64 * 2**20
"""Of logits that are there at a time."""


@dataclass(slots=True)
class KeptSequence:
    """One growing sequence; what chooses the next token appends it. `adapter` is one of the runner's, -1 for none."""

    ids: list[int]
    table: BlockTable
    num_computed: int = 0
    adapter: int = -1


class Memory:
    """A cache and its free blocks, with room for `num_tokens`, each sequence's rounded up to whole blocks."""

    def __init__(self, runner: Runner, num_tokens: int = 0, dtype: CacheDtype = "auto") -> None:
        num_blocks = blocks_for(num_tokens)
        self.dtype = dtype
        self.cache: Cache = runner.new_cache(num_blocks, dtype)
        self._pool = BlockPool(num_blocks)

    def begin(self, ids: Sequence[int], num_tokens: int = 0, adapter: int = -1) -> KeptSequence:
        """Return a new sequence with room for so many tokens.

        MemoryBudgetError if there are not as many free blocks.
        """
        table = BlockTable(self._pool)
        table.reserve(num_tokens)
        return KeptSequence(list(ids), table, adapter=adapter)

    def change(self, sequence: KeptSequence, ids: Sequence[int]) -> None:
        """Let a sequence have other ids: what is computed of those that both begin with stays. The cache may grow.

        MemoryBudgetError if there is not that much memory; the sequence is as it was then.
        """
        missing = sequence.table.missing(len(ids)) - self._pool.num_free
        if missing > 0:
            self.cache.grow(self.cache.num_blocks + max(missing, self.cache.num_blocks // 4))  # for tokens to come
            self._pool.add(self.cache.num_blocks - self._pool.num_blocks)
        sequence.table.reserve(len(ids))
        sequence.num_computed = min(sequence.num_computed, num_shared(sequence.ids, ids))
        sequence.ids = list(ids)


def advance(runner: Runner, cache: Cache, sequences: Sequence[KeptSequence], chunk: int = PREFILL_CHUNK) -> Logits:
    """Run what each sequence has not run yet, and return the logits after each one's last token, (B, V).

    Each of the sequences, at least one, has a token that has not been run. No result depends on `chunk`.
    """
    parts = [runner.run(batch, cache) for batch in batches(sequences, chunk)]
    return parts[0] if len(parts) == 1 else _join(parts)


def batches(sequences: Sequence[KeptSequence], chunk: int = PREFILL_CHUNK) -> Iterator[Batch]:
    """Yield the batches that bring sequences up to date, and count what each has run as it is asked for the next.

    Of each sequence's last token the logits are wanted, in the order of the sequences.
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
    """Return how many tokens two texts begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def num_rows(vocab_size: int, itemsize: int = 4) -> int:
    """Return how many rows of logits may be in memory at a time."""
    return max(1, CHUNK_BYTES // (itemsize * vocab_size))


def logits_of(runner: Runner, ids: Sequence[int], num_logits: int | None = None) -> Iterator[Floats]:
    """Run a text and yield the logits of its last tokens (None: all), (C, V) float32, a few at a time and in order."""
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
    """Run texts side by side and return the logits of the last tokens of each, (its number, V) float32.

    Each text has at least one token; `num_logits` is the number of each, together at most `num_rows`.
    """
    memory = Memory(runner, sum(blocks_for(len(ids)) for ids in rows) * BLOCK_SIZE)
    spans = [
        Span(ids, 0, memory.begin(ids, len(ids)).table.blocks, num_logits=count)
        for ids, count in zip(rows, num_logits, strict=True)
    ]
    return np.split(as_array(runner.run(pack(spans), memory.cache)), np.cumsum(num_logits)[:-1])


def _count(ends: Sequence[tuple[KeptSequence, int]]) -> None:
    """Note what has been run: afterwards, so that after an interruption it is still true."""
    for sequence, end in ends:
        sequence.num_computed = end


def _join(parts: Sequence[Logits]) -> Logits:
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(cast("list[np.ndarray[Any, Any]]", parts))
    import torch

    return torch.cat(parts)  # pyright: ignore[reportArgumentType]
