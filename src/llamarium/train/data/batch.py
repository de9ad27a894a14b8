"""Training batches: rows of tokens, and which of them are learned."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, Self

import torch
from torch import Tensor

IGNORED = -100
"""The label of a position that is not learned, as everywhere in the ecosystem."""


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """One micro-batch.

    Attributes:
        ids_BT: int64; the input tokens.
        labels_BT: int64; the token after each, or `IGNORED`. Already shifted: labels[b, t] follows ids[b, t].
        positions_BT: int64; they start at 0 in every segment of a row.
        segments_BT: int64; the document of each token within its row. None where every row is one segment, for which
            the fast causal kernel needs no mask.
        reference_E: float32; log P under a reference model: of each example's learned tokens, in the order of the
            examples in the rows, or in an `AnswerBatch` of each token. None where no loss needs it.
        weights_BT: float32; what each label's loss is multiplied by. None is 1 for all.
    """

    ids_BT: Tensor
    labels_BT: Tensor
    positions_BT: Tensor
    segments_BT: Tensor | None
    reference_E: Tensor | None = None
    weights_BT: Tensor | None = None

    @property
    def num_learned(self) -> int:
        """The number of labels that count."""
        return int((self.labels_BT != IGNORED).sum())  # sync: on a GPU, so call it before `to`

    @property
    def sum_of_weights(self) -> float:
        """The sum of the learned labels' weights: their number if all are 1."""
        if self.weights_BT is None:
            return self.num_learned
        return float(self.weights_BT[self.labels_BT != IGNORED].double().sum())

    def to(self, device: torch.device) -> Self:
        """Copy the batch to another device."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {
            name: None if t is None else t.to(device, non_blocking=True) for name, t in tensors.items()
        }
        return replace(self, **moved)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerBatch(TrainingBatch):
    """Answers that were sampled and rewarded, one a row; all of a row's learned tokens (N in all) are its answer's.

    Attributes:
        advantages_N: float32; how much better than its group's mean the token's answer was.
        sampled_N: float32; log P of each token in the pass that sampled it.
        exact_N: float32; log P of each token in the pass in C over the weights of now. None where the training's own
            pass says how probable a token is.
    """

    advantages_N: Tensor
    sampled_N: Tensor
    exact_N: Tensor | None = None


def join(batches: Sequence[TrainingBatch]) -> TrainingBatch:
    """Concatenate the rows of several batches."""
    if len(batches) == 1:
        return batches[0]
    several = any(batch.segments_BT is not None for batch in batches)
    references = [batch.reference_E for batch in batches if batch.reference_E is not None]
    weighted = any(batch.weights_BT is not None for batch in batches)
    weights = [torch.ones(b.ids_BT.shape) if b.weights_BT is None else b.weights_BT for b in batches]
    segments = [torch.zeros_like(b.ids_BT) if b.segments_BT is None else b.segments_BT for b in batches]
    return TrainingBatch(
        torch.cat([batch.ids_BT for batch in batches]),
        torch.cat([batch.labels_BT for batch in batches]),
        torch.cat([batch.positions_BT for batch in batches]),
        torch.cat(segments) if several else None,
        torch.cat(references) if references else None,
        torch.cat(weights) if weighted else None,
    )


class Rows(Protocol):
    """The data of a run: rows of `context` tokens with random access.

    `fingerprint` is the SHA-256, hex, of the content and everything that shapes the rows, the tokenizer included.
    """

    fingerprint: str
    context: int

    @property
    def about(self) -> Mapping[str, Any]:
        """Counts, and the SHA-256 of parts by name, to describe a difference between data sets."""
        ...

    def num_rows(self, epoch: int) -> int:
        """The number of rows of an epoch."""
        ...

    def batch(self, epoch: int, indices: Sequence[int]) -> TrainingBatch:
        """Return rows of an epoch; the same arguments give the same tensors."""
        ...


class SplitRows(Rows, Protocol):
    """Rows of which a share can be held out."""

    def split(self, validation: float) -> tuple[Self, Self]:
        """Return the rows to train on, and the last share of them to validate; TrainingError if either has none."""
        ...
