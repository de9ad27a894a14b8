"""What a step makes small: the next token's surprise; or, of two answers, the margin by which the wrong one wins.

A step adds up an objective over its batches and divides by how many there are in all of them, so that several small
batches give what one large batch gives.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from llamarium.model import LlamaForCausalLM
from llamarium.train.data.batch import TrainingBatch
from llamarium.train.objectives.cross_entropy import cross_entropy_sum

Trunk = Callable[[LlamaForCausalLM, TrainingBatch], Tensor]
"""From a batch to its normalised hidden states, (B, T, D)."""


class Objective(Protocol):
    """What is learned."""

    def count(self, batch: TrainingBatch) -> int:
        """Return how many terms a batch's sum has: learned tokens, or pairs."""
        ...

    def loss_sum(
        self, model: LlamaForCausalLM, batch: TrainingBatch, trunk: Trunk
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the sum of the loss over a batch, differentiable, and sums of what is told besides, by name."""
        ...


class NextToken:
    """-log P of each learned token, in nats."""

    def count(self, batch: TrainingBatch) -> int:
        """Return the number of learned tokens."""
        return batch.num_learned

    def loss_sum(
        self, model: LlamaForCausalLM, batch: TrainingBatch, trunk: Trunk
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the sum of -log P over a batch's learned tokens."""
        return cross_entropy_sum(trunk(model, batch), head_weight(model), batch.labels_BT), {}


NEXT_TOKEN = NextToken()


def head_weight(model: LlamaForCausalLM) -> Tensor:
    """The head's weight, (V, D); dequantized, and without a gradient, where the head is packed."""
    head = model.lm_head
    return head.weight if head.weight.is_floating_point() else head.dequantize(model.dtype)  # pyright: ignore
