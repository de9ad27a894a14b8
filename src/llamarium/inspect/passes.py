"""Logits of a text's tokens through the runner that answers requests, a few positions at a time."""

from collections.abc import Iterator, Sequence

import numpy as np

from llamarium.generation.kept import PREFILL_CHUNK, Memory
from llamarium.inspect.numbers import Floats, as_array
from llamarium.runtime.batch import BLOCK_SIZE, Span, pack
from llamarium.runtime.blocks import blocks_for
from llamarium.runtime.runner import Runner

CHUNK_BYTES = 64 * 2**20
"""Of logits that are there at a time."""


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
