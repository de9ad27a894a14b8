"""DPO: preference tuning on pairs of answers, without a reward model and without sampling.

One could learn a reward r(x, y) from preferences, and train a policy to maximize it while staying close to a reference
model. The optimal policy is known in closed form; solved for the reward it gives

    r(x, y) = beta * (log P(y | x) - log P_reference(y | x)) + a term of x alone

So the policy is its own reward model. Within a pair the term of x cancels, and the loss is that of classifying the
chosen answer against the rejected one by their rewards:

    loss = -log sigmoid(r(x, chosen) - r(x, rejected))

With label smoothing (conservative DPO), a share e of the pairs is assumed to have its labels swapped. The loss is then
the expectation: with m = r(x, chosen) - r(x, rejected),

    loss = -(1 - e) log sigmoid(m) - e log sigmoid(-m)

which is lowest at the margin m = log((1 - e) / e) instead of at infinity.

The loss starts at log 2, where policy and reference are equal; beta is the cost of moving away from the reference. The
reference is the model at the start of the run. With new adapters it is the model with its adapters disabled, which
costs a second forward pass. In full training, and when training continues from an adapter, its log-probabilities are
computed once, before the first step.

Only the answers' tokens count. A chosen answer may become less likely while the loss falls, if the rejected one becomes
less likely still, so both rewards are reported next to their margin.

Source: Rafailov et al. 2023, "Direct Preference Optimization: Your Language Model is Secretly a Reward Model", equation
7 for the loss and 5 for the reward; Mitchell 2023, "A note on DPO with noisy preferences & relationship to IPO",
equation 3, for label smoothing.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from llamarium.adapters.lora import adapted_modules, without_adapters
from llamarium.errors import TrainingError
from llamarium.model import LlamaForCausalLM
from llamarium.train import finetune
from llamarium.train.config import DPOConfig
from llamarium.train.data.batch import IGNORED, TrainingBatch
from llamarium.train.data.pairs import PairRows
from llamarium.train.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from llamarium.train.objectives.base import Trunk
from llamarium.train.objectives.logprobs import learned_logprobs
from llamarium.train.setup import Setup
from llamarium.train.step import causal_trunk, computing_in


class Preference:
    """The DPO objective.

    Args:
        beta: Cost of moving away from the reference; above 0.
        label_smoothing: Share of pairs whose answers are assumed to be swapped, 0 to 0.5.
    """

    def __init__(self, beta: float, label_smoothing: float = 0.0) -> None:
        self.beta, self.label_smoothing = beta, label_smoothing

    def count(self, batch: TrainingBatch) -> int:
        """Return the number of pairs."""
        return len(_counts(batch)) // 2

    def loss_sum(
        self, model: LlamaForCausalLM, batch: TrainingBatch, trunk: Trunk
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the sum of a batch's losses, and the sums of its rewards, margins and correctly ranked pairs.

        If the batch has no reference log-probabilities, the model without its adapters is the reference.
        """
        reference_E = batch.reference_E
        if reference_E is None:
            assert any(adapted_modules(model))  # without adapters to switch off, the model would be its own reference
            with torch.no_grad(), without_adapters(model):
                reference_E = answer_logprobs(model, batch, trunk)
        policy_E = answer_logprobs(model, batch, trunk)
        loss_P, rewards_P2 = dpo_loss(policy_E, reference_E, self.beta, self.label_smoothing)
        margin_P = rewards_P2[:, 0] - rewards_P2[:, 1]
        return loss_P.sum(), {
            "reward_chosen": rewards_P2[:, 0].sum(),
            "reward_rejected": rewards_P2[:, 1].sum(),
            "reward_margin": margin_P.sum(),
            "reward_accuracy": (margin_P > 0).float().sum(),
        }


def dpo_loss(policy_E: Tensor, reference_E: Tensor, beta: float, label_smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return the loss of each pair (P,), and the detached rewards of its answers (P, 2).

    `policy_E` and `reference_E` are the log-probabilities of the answers: chosen, rejected, chosen, ...
    """
    rewards_P2 = beta * (policy_E - reference_E).view(-1, 2)
    margin_P = rewards_P2[:, 0] - rewards_P2[:, 1]
    loss_P = -F.logsigmoid(margin_P)
    if label_smoothing:
        loss_P = (1 - label_smoothing) * loss_P - label_smoothing * F.logsigmoid(-margin_P)
    return loss_P, rewards_P2.detach()


def answer_logprobs(model: LlamaForCausalLM, batch: TrainingBatch, trunk: Trunk = causal_trunk) -> Tensor:
    """Return the log-probability of each answer in a batch, summed over its tokens: (E,), float32, in row order."""
    logprobs_N, counts_E = learned_logprobs(model, batch, trunk), _counts(batch)
    answer_N = torch.arange(len(counts_E), device=counts_E.device).repeat_interleave(counts_E)
    return logprobs_N.new_zeros(len(counts_E)).index_add(0, answer_N, logprobs_N)


def _counts(batch: TrainingBatch) -> Tensor:
    """Return the number of learned tokens of each answer: (E,)."""
    assert batch.segments_BT is not None  # the two answers of a pair are two segments
    num_rows, length = batch.labels_BT.shape
    keys_BT = batch.segments_BT + torch.arange(num_rows, device=batch.segments_BT.device)[:, None] * (length + 1)
    return torch.unique_consecutive(keys_BT[batch.labels_BT != IGNORED], return_counts=True)[1]


@torch.no_grad()
def set_reference(
    rows: PairRows, model: LlamaForCausalLM, batch_rows: int, precision: Literal["float32", "bfloat16"] = "float32"
) -> None:
    """Compute the log-probability of every answer under `model`, and store it in the rows.

    Precision and batch shape are the run's; otherwise the first step would see a rounding difference between policy and
    reference.
    """
    found_E, each = torch.empty(len(rows.examples)), rows.once()
    last = each.num_rows(0) - 1
    for start in range(0, last + 1, batch_rows):
        indices = [min(index, last) for index in range(start, start + batch_rows)]  # the last row fills the last batch
        numbers = torch.tensor(each.examples_of(0, indices))
        with computing_in(model.device, precision):
            found_E[numbers] = answer_logprobs(model, each.batch(0, indices).to(model.device)).cpu()
    rows.reference_E = found_E


first_row = partial(finetune.first_row, kind=PairRows)


def prepare(config: DPOConfig, process_group: ProcessGroup = SINGLE_PROCESS) -> Setup:
    """Load the base and the pairs, add adapters, and compute the reference if needed; errors as `finetune.prepare`."""
    if process_group.world_size > 1:
        raise TrainingError("dpo trains in one process, as its reference is the same model; start it without torchrun")
    setup = finetune.prepare(config, process_group, partial(finetune.read_rows, kind=PairRows))
    if config.method == "full" or config.adapter:
        for rows in (setup.train, setup.validation):
            if rows is not None:
                assert isinstance(rows, PairRows)  # as passed to `finetune.prepare`
                set_reference(rows, setup.model, config.batch_rows, setup.config.chosen_precision)
    return replace(setup, objective=Preference(config.beta, config.label_smoothing))
