"""Training objectives: the protocol, and next-token cross-entropy.

A step sums an objective over its micro-batches and divides by their total number of terms, so that gradient
accumulation gives the same result as one large batch.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from llamarium.adapters.lora import LoRALinear
from llamarium.model import LlamaForCausalLM
from llamarium.train.data.batch import TrainingBatch
from llamarium.train.objectives.cross_entropy import cross_entropy_sum

Trunk = Callable[[LlamaForCausalLM, TrainingBatch], Tensor]
"""Computes the normalized hidden states of a batch, (B, T, D)."""


class Objective(Protocol):
    """A loss function with a count of its terms."""

    def count(self, batch: TrainingBatch) -> float:
        """Return the number of terms in a batch's sum: learned tokens (the sum of their weights), or pairs."""
        ...

    def loss_sum(
        self, model: LlamaForCausalLM, batch: TrainingBatch, trunk: Trunk
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the sum of the loss over a batch, differentiable, and sums of other metrics by name."""
        ...


class NextToken:
    """Next-token cross-entropy: -log P of each learned token in nats, times its weight."""

    def count(self, batch: TrainingBatch) -> float:
        """Return the sum of the learned tokens' weights; their number if all weights are 1."""
        return batch.sum_of_weights

    def loss_sum(
        self, model: LlamaForCausalLM, batch: TrainingBatch, trunk: Trunk
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the weighted sum of -log P over a batch's learned tokens."""
        hidden_BTD = trunk(model, batch)
        return cross_entropy_sum(hidden_BTD, head_weight(model), batch.labels_BT, batch.weights_BT), {}


NEXT_TOKEN = NextToken()


def head_weight(model: LlamaForCausalLM) -> Tensor:
    """Return the weight of the LM head, (V, D), including an adapter's; a quantized one is dequantized, no gradient."""
    head = model.lm_head
    if isinstance(head, LoRALinear):
        return head.effective_weight(model.dtype)
    return head.weight if head.weight.is_floating_point() else head.dequantize(model.dtype)  # pyright: ignore
