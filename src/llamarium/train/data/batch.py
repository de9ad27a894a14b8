"""What a training step is given: rows of tokens, and which of them are to be learned."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

IGNORED = -100
"""The label of a position that is not learned, as everywhere in the ecosystem."""


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """One micro-batch.

    Attributes:
        ids_BT: int64; the tokens that the model sees.
        labels_BT: int64; the token after each, or `IGNORED`. Shifted already: labels[b, t] follows ids[b, t].
        positions_BT: int64; they begin at 0 with every segment of a row.
        segments_BT: int64; which document of its row a token belongs to. None where every row is one segment, which
            the fast causal kernel knows without a mask.
        reference_E: float32; log P of each example's learned tokens under a reference model, in the order in which the
            examples lie in the rows. None where no loss asks for it.
    """

    ids_BT: Tensor
    labels_BT: Tensor
    positions_BT: Tensor
    segments_BT: Tensor | None
    reference_E: Tensor | None = None

    @property
    def num_learned(self) -> int:
        """Labels that count."""
        return int((self.labels_BT != IGNORED).sum())  # sync: on a GPU, so it is asked before `to`

    def to(self, device: torch.device) -> "TrainingBatch":
        """Return the batch on another device."""
        segments_BT = None if self.segments_BT is None else self.segments_BT.to(device, non_blocking=True)
        ids_BT, labels_BT, positions_BT = (
            t.to(device, non_blocking=True) for t in (self.ids_BT, self.labels_BT, self.positions_BT)
        )
        reference_E = None if self.reference_E is None else self.reference_E.to(device, non_blocking=True)
        return TrainingBatch(ids_BT, labels_BT, positions_BT, segments_BT, reference_E)


def join(batches: Sequence[TrainingBatch]) -> TrainingBatch:
    """Return the rows of several batches of the same source as one."""
    if len(batches) == 1:
        return batches[0]
    several = any(batch.segments_BT is not None for batch in batches)
    references = [batch.reference_E for batch in batches if batch.reference_E is not None]
    segments = [torch.zeros_like(b.ids_BT) if b.segments_BT is None else b.segments_BT for b in batches]
    return TrainingBatch(
        torch.cat([batch.ids_BT for batch in batches]),
        torch.cat([batch.labels_BT for batch in batches]),
        torch.cat([batch.positions_BT for batch in batches]),
        torch.cat(segments) if several else None,
        torch.cat(references) if references else None,
    )


class Rows(Protocol):
    """What a run learns from: rows of one length, any of which can be had at any time.

    Attributes:
        fingerprint: SHA-256, hex, over the content and everything that shapes the rows, the tokenizer included.
        context: T.
    """

    fingerprint: str
    context: int

    @property
    def about(self) -> Mapping[str, Any]:
        """What the data is, so that a difference can be told: counts, and the SHA-256 of its parts by their names."""
        ...

    def num_rows(self, epoch: int) -> int:
        """How many rows an epoch has; it may differ from epoch to epoch."""
        ...

    def batch(self, epoch: int, indices: Sequence[int]) -> TrainingBatch:
        """Return these rows of an epoch; the same arguments give the same tensors."""
        ...
