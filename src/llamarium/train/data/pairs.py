"""Read pairs of answers for preference training: one chosen, one rejected.

`datasets/forms.py` defines which rows are pairs. Each becomes two examples with the same prompt, in which only the
answer and its end token are learned. Both are in the same row, so that no batch has half a pair.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from llamarium.datasets.forms import pair_of
from llamarium.train.data.batch import TrainingBatch
from llamarium.train.data.dialog_rows import DialogRows
from llamarium.train.data.dialogs import checked_pair, read_dialogs

read_pairs = partial(read_dialogs, understand=pair_of, finish=checked_pair)
"""Read the pairs of a source: two examples per row, the chosen one first. See `read_dialogs`."""


class PairRows(DialogRows):
    """Pairs packed into rows, in a new order every epoch; `reference_E` is each answer's reference log-probability."""

    together = 2
    _read = staticmethod(read_pairs)
    _label = "pair rows 1"
    reference_E: Tensor | None = None

    def batch(self, epoch: int, indices: Sequence[int]) -> TrainingBatch:
        """Return rows of an epoch; the same arguments give the same tensors."""
        batch = super().batch(epoch, indices)
        if self.reference_E is None:
            return batch
        return replace(batch, reference_E=self.reference_E[torch.tensor(self.examples_of(epoch, indices))])

    def examples_of(self, epoch: int, indices: Sequence[int]) -> list[int]:
        """Return the indices of the examples in these rows, in row order."""
        rows = self._rows(epoch)
        return [number for index in indices for number in rows[index]]
