"""GRPO: of several answers to a prompt, make those likelier that were rewarded more than the others.

A group of G answers is sampled from the policy as it is. An answer's advantage is its reward compared with its group's,

    A_i = (r_i - mean(r)) / std(r)

so no second model has to learn what a prompt is worth. Each of the answer's tokens is moved by it:

    ratio = P(token) / P(token) when it was sampled
    loss  = -min(ratio * A, clip(ratio, 1 - epsilon, 1 + epsilon) * A) + beta * KL

At the first update the ratio is 1; in later ones of the same answers the clip ends the pull of a token that has moved
far enough. KL is the distance from a frozen reference, estimated at each token by x - log x - 1 with
x = P_reference / P: never negative, and right on average. beta is its weight.

The mean is over all tokens of a step, so that a token counts the same in a long answer and in a short one.

Source: Shao et al. 2024, "DeepSeekMath", equations 3 and 4; Schulman 2020, "Approximating KL Divergence", for the
estimate of KL; Yu et al. 2025, "DAPO", section 3.3, for the mean over tokens; Schulman et al. 2017, "PPO", equation 7,
for the clip.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llamarium.model import LlamaForCausalLM
from llamarium.train.data.batch import AnswerBatch, TrainingBatch
from llamarium.train.objectives.base import Trunk
from llamarium.train.objectives.logprobs import learned_logprobs


@dataclass(frozen=True, slots=True)
class GroupPolicy:
    """The objective of `AnswerBatch`es; `epsilon` bounds the ratio, `beta` is the weight of KL (0 is off)."""

    epsilon: float
    beta: float

    def count(self, batch: TrainingBatch) -> int:
        """Return the number of the answers' tokens."""
        return batch.num_learned

    def loss_sum(
        self, model: LlamaForCausalLM, batch: TrainingBatch, trunk: Trunk
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return a batch's sum of losses, and sums over tokens of ratio, clipped and KL.

        `largest_difference` is the largest one between log P in the pass that sampled and in the pass that trains.
        """
        assert isinstance(batch, AnswerBatch)
        logprobs_N = learned_logprobs(model, batch, trunk)
        if batch.exact_N is not None:  # its values, with the gradient of this pass
            logprobs_N = _WithValues.apply(logprobs_N, batch.exact_N)
            assert isinstance(logprobs_N, Tensor)
        change_N = logprobs_N - batch.sampled_N
        ratio_N, low, high = change_N.exp(), 1 - self.epsilon, 1 + self.epsilon
        free_N, held_N = ratio_N * batch.advantages_N, ratio_N.clamp(low, high) * batch.advantages_N
        loss_N = -torch.minimum(free_N, held_N)
        sums = {
            "ratio": ratio_N.detach().sum(),
            "clipped": (held_N < free_N).float().sum(),
            "largest_difference": change_N.detach().abs().max() if len(change_N) else change_N.new_zeros(()),
        }
        if batch.reference_E is not None:
            apart_N = batch.reference_E - logprobs_N
            kl_N = apart_N.exp() - apart_N - 1
            loss_N, sums["kl"] = loss_N + self.beta * kl_N, kl_N.detach().sum()
        return loss_N.sum(), sums


class _WithValues(torch.autograd.Function):
    """Values of a more exact pass, with the gradient of the first argument's; a + (b - a) would not be b."""

    @staticmethod
    def forward(ctx: Any, logprobs_N: Tensor, exact_N: Tensor) -> Tensor:
        return exact_N.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return grad_outputs[0], None
