"""The order of the data: drawn from a seed, and resumable from two numbers.

An epoch is a permutation of its rows, drawn from (seed, epoch) alone, and so is what it holds of a mixture. So an epoch
and an index describe the position in the data, and a resumed run continues with exactly the rows that it would have
seen.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from llamarium.errors import TrainingError, escape, show_value
from llamarium.train.data.batch import Rows, TrainingBatch, join


def derived_seed(purpose: str, seed: int, number: int) -> int:
    """Return the seed of one draw, from 0 to 2**63 - 1, independent for each purpose, run seed and epoch or step."""
    digest = hashlib.sha256(f"{purpose} {seed} {number}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def permutation(length: int, seed: int | None, purpose: str, number: int) -> Tensor:
    """Return the numbers below `length` in an order drawn by `derived_seed`, int64; without a seed in theirs."""
    if seed is None:
        return torch.arange(length)
    return torch.randperm(length, generator=torch.Generator().manual_seed(derived_seed(purpose, seed, number)))


@dataclass(frozen=True, slots=True)
class Mixture:
    """How often, and in which order, the units (examples, pairs, prompts, rows) of some sources are drawn.

    Attributes:
        weights: Of each source, by name; `mixture.py` says what they mean.
        sizes: The number of each source's units.
        seed: Of the order; None draws the sources one after the other, each in its own order, for validation.
    """

    weights: Mapping[str, float]
    sizes: Sequence[int]
    seed: int | None

    @property
    def counts(self) -> list[int]:
        """How often each source is drawn in an epoch: to the nearest whole number, and at least once."""
        scale = sum(self.sizes) / sum(self.weights.values())
        return [max(1, round(weight * scale)) for weight in self.weights.values()]

    def draws(self, epoch: int) -> Tensor:
        """Return an epoch's draws, int64 (n, 3): source, complete passes over it before, and unit within it."""
        return _draws(tuple(self.sizes), tuple(self.counts), self.seed, epoch)

    def units(self, epoch: int) -> Tensor:
        """Return an epoch's draws as numbers of units, counted through all sources; int64 (n,)."""
        starts, drawn = torch.tensor([0, *self.sizes]).cumsum(0), self.draws(epoch)
        return starts[drawn[:, 0]] + drawn[:, 2]

    def split(self, validation: float) -> tuple[tuple[list[int], "Mixture"], tuple[list[int], "Mixture"]]:
        """Return the units to train on, and the last share of each source's, in a fixed order, to validate.

        TrainingError if a source would have none of either.
        """
        parts: tuple[list[int], list[int]] = [], []
        held: list[int] = []
        for name, size in zip(self.weights, self.sizes, strict=True):
            held.append(max(1, round(size * validation)) if validation > 0 else 0)
            if not 0 < held[-1] < size:
                raise TrainingError(
                    f"{f'{escape(name)}: ' * bool(name)}a share of {show_value(validation)} of {size} examples is "
                    f"{held[-1]}; expected at least one to validate and one to train on: give more examples, or no "
                    "validation (--validation 0)"
                )
            start = sum(map(len, parts))
            parts[0].extend(range(start, start + size - held[-1]))
            parts[1].extend(range(start + size - held[-1], start + size))
        kept = [size - count for size, count in zip(self.sizes, held, strict=True)]
        return (parts[0], replace(self, sizes=kept)), (parts[1], replace(self, sizes=held, seed=None))

    @property
    def label(self) -> str:
        """What a fingerprint has to say of several sources; empty for one."""
        return f" {self.counts} {[*self.sizes]}" if len(self.sizes) > 1 else ""

    def about(self, tokens: Sequence[int]) -> dict[str, list[dict[str, Any]]]:
        """Return "sources", of several each one's share of the draws and passes an epoch, as JSON values.

        `tokens` are those of each unit, or of each source.
        """
        if len(tokens) > len(self.sizes):
            tokens = [sum(tokens[a:b]) for a, b in pairwise([0, *accumulate(self.sizes)])]
        rows = zip(self.weights.items(), self.counts, self.sizes, tokens, strict=True)
        found = [
            {"source": name, "weight": weight, "share": n / sum(self.counts), "passes": n / size, "tokens": held}
            for (name, weight), n, size, held in rows
        ]
        return {"sources": found} if len(found) > 1 else {}


@lru_cache(maxsize=4)  # a batch may be of two epochs, and a validation comes between
def _draws(sizes: Sequence[int], counts: Sequence[int], seed: int | None, epoch: int) -> Tensor:
    found: list[Tensor] = []
    for source, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        first, end = epoch * count, (epoch + 1) * count
        for done in range(first // size, (end - 1) // size + 1):
            order = permutation(size, seed, f"dialogs {source}" if source else "dialogs", done)
            units = order[max(0, first - done * size) : end - done * size]
            found.append(torch.stack([torch.full_like(units, source), torch.full_like(units, done), units], 1))
    drawn = torch.cat(found)
    return drawn if len(sizes) == 1 else drawn[permutation(len(drawn), seed, "mixture", epoch)]


@dataclass(frozen=True, slots=True)
class Cursor:
    """Position in the data: complete passes over it, and rows taken of the current one."""

    epoch: int = 0
    index: int = 0


class Order:
    """Returns the rows of a run, batch by batch, from `cursor` on; TrainingError if there is no row.

    With several shards, `take` returns those of `shard_idx`.
    """

    def __init__(
        self, rows: Rows, seed: int, cursor: Cursor | None = None, *, shard_idx: int = 0, num_shards: int = 1
    ) -> None:
        self.rows = rows
        self.seed = seed
        self.shard_idx, self.num_shards = shard_idx, num_shards
        self.cursor = Cursor() if cursor is None else cursor
        self._permutation = self._permute(self.cursor.epoch)

    def take(self, count: int) -> TrainingBatch:
        """Return the next `count` rows, or this process's shard; TrainingError if the shards would differ in size."""
        if count % self.num_shards:
            raise TrainingError(
                f"batch_rows is {count}; expected a multiple of the {self.num_shards} shards of the data"
            )
        places = self.places(count)[self.shard_idx :: self.num_shards]
        epochs = sorted({epoch for epoch, _ in places})
        return join([self.rows.batch(epoch, [i for e, i in places if e == epoch]) for epoch in epochs])

    def places(self, count: int) -> list[tuple[int, int]]:
        """Return the epochs and indices of the next `count` rows, and advance."""
        return [self._next() for _ in range(count)]

    def _next(self) -> tuple[int, int]:
        """Return the epoch and the index of the next row, and advance."""
        if self.cursor.index >= len(self._permutation):
            self.cursor = Cursor(self.cursor.epoch + 1)
            self._permutation = self._permute(self.cursor.epoch)
        epoch, index = self.cursor.epoch, self.cursor.index
        self.cursor = Cursor(epoch, index + 1)
        return epoch, self._permutation[index]

    def _permute(self, epoch: int) -> Sequence[int]:
        num_rows = self.rows.num_rows(epoch)
        if num_rows < 1:
            raise TrainingError(f"the data has no row of {self.rows.context} tokens; expected at least one")
        return permutation(num_rows, self.seed, "order", epoch).tolist()
