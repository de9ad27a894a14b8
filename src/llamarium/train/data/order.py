"""The order of the data: decided by a seed, and resumable from two numbers.

An epoch is a permutation of its rows, drawn from (seed, epoch) alone. So where a run stands in its data is an epoch and
an index into it; nothing else has to be saved, and a run that was interrupted goes on with exactly the rows it would
have seen.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from llamarium.errors import TrainingError
from llamarium.train.data.batch import Rows, TrainingBatch, join


def derived_seed(purpose: str, seed: int, number: int) -> int:
    """Return the seed of one draw of a run, from 0 to 2**63 - 1.

    Args:
        purpose: What is drawn: draws for different purposes have nothing to do with each other.
        seed: The run's.
        number: Of the epoch or the step.
    """
    digest = hashlib.sha256(f"{purpose} {seed} {number}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where a run stands in its data.

    Attributes:
        epoch: Passes over the data that are complete.
        index: Rows of this epoch that have been taken.
    """

    epoch: int = 0
    index: int = 0


class Order:
    """Hands out the rows of a run, batch by batch.

    Args:
        rows: What is learned from.
        seed: Of the order.
        cursor: Where to go on.
        shard_idx: Which shard of the rows is returned, if several processes share them.
        num_shards: How many shards there are.

    Raises:
        TrainingError: If there is no row.
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
        """Return the next `count` rows, or this process's shard of them.

        An epoch's last rows share a batch with the next one's first, so that none is left out and any data serves.

        Raises:
            TrainingError: If they cannot be divided evenly.
        """
        if count % self.num_shards:
            raise TrainingError(
                f"batch_rows is {count}; expected a multiple of the {self.num_shards} shards of the data"
            )
        places = [self._next() for _ in range(count)][self.shard_idx :: self.num_shards]
        epochs = sorted({epoch for epoch, _ in places})
        return join([self.rows.batch(epoch, [i for e, i in places if e == epoch]) for epoch in epochs])

    def _next(self) -> tuple[int, int]:
        """Return the epoch and the number of the next row, and step over it."""
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
        generator = torch.Generator().manual_seed(derived_seed("order", self.seed, epoch))
        return torch.randperm(num_rows, generator=generator).tolist()
