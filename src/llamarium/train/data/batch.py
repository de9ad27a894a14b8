"""Training batches: rows of tokens and labels."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, Self

import torch
from torch import Tensor

IGNORED = -100
"""Label of positions without a loss, as in PyTorch and Transformers."""


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """A micro-batch.

    Attributes:
        ids_BT: int64; input tokens.
        labels_BT: int64; the next token, or `IGNORED`. Already shifted: labels[b, t] follows ids[b, t].
        positions_BT: int64; positions, starting at 0 in every segment of a row.
        segments_BT: int64; segment (document) of each token within its row. None if every row is one segment, so that
            the causal kernel needs no mask.
        reference_E: float32; log-probabilities under the reference model, one per example in row order (the sum over
            its learned tokens), or one per token in an `AnswerBatch`. None if no loss needs them.
        weights_BT: float32; loss weight of each label. None means 1.
    """

    ids_BT: Tensor
    labels_BT: Tensor
    positions_BT: Tensor
    segments_BT: Tensor | None
    reference_E: Tensor | None = None
    weights_BT: Tensor | None = None

    @property
    def num_learned(self) -> int:
        """Number of labels that are not `IGNORED`."""
        return int((self.labels_BT != IGNORED).sum())  # sync: on a GPU, so call it before `to`

    @property
    def sum_of_weights(self) -> float:
        """Sum of the learned labels' weights; their number if all weights are 1."""
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
    """Sampled and rewarded answers, one per row; N is the number of answer tokens, which are the learned ones.

    Attributes:
        advantages_N: float32; advantage of each token's answer.
        sampled_N: float32; log-probability of each token when it was sampled.
        exact_N: float32; log-probability of each token under the current weights, computed by the C kernels. None uses
            those of the training pass.
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

    `fingerprint` is the SHA-256, hex, of the content and of everything that determines the rows, including the
    tokenizer.
    """

    fingerprint: str
    context: int

    @property
    def about(self) -> Mapping[str, Any]:
        """Counts and SHA-256 of parts by name, used to describe differences between data sets."""
        ...

    def num_rows(self, epoch: int) -> int:
        """Return the number of rows in an epoch."""
        ...

    def batch(self, epoch: int, indices: Sequence[int]) -> TrainingBatch:
        """Return rows of an epoch; the same arguments give the same tensors."""
        ...


class SplitRows(Rows, Protocol):
    """Rows that can be split into training and validation rows."""

    def split(self, validation: float) -> tuple[Self, Self]:
        """Return the training rows and the validation rows (the last share); TrainingError if either is empty."""
        ...
