"""The GRPO objective: increase the probability of answers with an above-average reward within their group.

A group of G answers is sampled from the current policy. The advantage of an answer is its reward relative to its group,

    A_i = (r_i - mean(r)) / std(r)

so no value model is needed. The loss of each of its tokens is

    ratio = P(token) / P(token) when it was sampled
    loss  = -min(ratio * A, clip(ratio, 1 - epsilon, 1 + epsilon) * A) + beta * KL

The ratio is 1 at the first update; in further updates on the same answers, clipping removes the gradient of tokens
whose ratio has changed enough. KL is the divergence from a frozen reference model, estimated per token by
x - log x - 1 with x = P_reference / P, which is non-negative and unbiased. beta is its weight.

The mean is over all tokens of a step, so that a token has the same weight in a long and in a short answer.

Source: Shao et al. 2024, "DeepSeekMath", equations 3 and 4; Schulman 2020, "Approximating KL Divergence", for the KL
estimator; Yu et al. 2025, "DAPO", section 3.3, for the mean over tokens; Schulman et al. 2017, "PPO", equation 7, for
clipping.
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
    """The GRPO objective for an `AnswerBatch`; `epsilon` is the clipping range, `beta` the weight of KL (0 is off)."""

    epsilon: float
    beta: float

    def count(self, batch: TrainingBatch) -> int:
        """Return the number of answer tokens."""
        return batch.num_learned

    def loss_sum(
        self, model: LlamaForCausalLM, batch: TrainingBatch, trunk: Trunk
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the sum of a batch's losses, and the sums over its tokens of ratio, clipped and KL.

        `largest_difference` is the maximum difference of log-probabilities between the sampling and the training pass.
        """
        assert isinstance(batch, AnswerBatch)
        logprobs_N = learned_logprobs(model, batch, trunk)
        if batch.exact_N is not None:  # use its values with the gradient of this pass
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
    """Returns the values of the second argument with the gradient of the first; a + (b - a) would be rounded."""

    @staticmethod
    def forward(ctx: Any, logprobs_N: Tensor, exact_N: Tensor) -> Tensor:
        return exact_N.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return grad_outputs[0], None
