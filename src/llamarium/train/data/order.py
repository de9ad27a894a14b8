"""The order of the data: determined by a seed, and resumable from an epoch and an index.

An epoch is a permutation of its rows that depends only on (seed, epoch), as do the draws of a mixture. An epoch and an
index therefore describe the position in the data, and a resumed run continues with exactly the rows of an uninterrupted
one.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llamarium.errors import TrainingError, counted
from llamarium.train.data.batch import Rows, TrainingBatch, join


def derived_seed(purpose: str, seed: int, number: int) -> int:
    """Return the seed of one draw, from 0 to 2**63 - 1, independent for each purpose, run seed and epoch or step."""
    digest = hashlib.sha256(f"{purpose} {seed} {number}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def permutation(length: int, seed: int | None, purpose: str, number: int) -> Tensor:
    """Return a permutation of the numbers below `length`, int64, seeded by `derived_seed`; sorted if `seed` is None."""
    if seed is None:
        return torch.arange(length)
    return torch.randperm(length, generator=torch.Generator().manual_seed(derived_seed(purpose, seed, number)))


@dataclass(frozen=True, slots=True)
class Cursor:
    """Position in the data: completed epochs, and rows taken from the current one."""

    epoch: int = 0
    index: int = 0


class Order:
    """Returns the rows of a run in batches, starting at `cursor`; TrainingError if there is no row.

    With several shards, `take` returns the rows of `shard_idx`.
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
                f"batch_rows is {count}; expected a multiple of the {counted(self.num_shards, 'shard')} of the data"
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
            raise TrainingError(f"the data has no row of {counted(self.rows.context, 'token')}; expected at least one")
        return permutation(num_rows, self.seed, "order", epoch).tolist()
