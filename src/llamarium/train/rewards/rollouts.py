"""Rollouts: sample groups of answers from the policy, reward them, and make batches of them.

On a CPU the C kernels sample directly from the memory that the optimizer updates, without copying or exporting weights.
A model that they do not support (NF4, on a GPU) samples through its PyTorch modules. Answers depend only on the run's
seed, the step and the weights, so a resumed run samples the same answers as an uninterrupted one.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llamarium.adapters.lora import LoRALinear, lora_linears
from llamarium.adapters.lora_embedding import LoRAEmbedding
from llamarium.checkpoints.choose_runner import runner_over
from llamarium.checkpoints.weights import float_weights, replaced_in_c
from llamarium.config import EMBEDDING
from llamarium.errors import OptionError, TrainingError, counted, show_value
from llamarium.generation.completion import stop_ids_of
from llamarium.generation.loop import generate_tokens
from llamarium.model import LlamaForCausalLM
from llamarium.runtime.adapter import LowRank
from llamarium.runtime.loaded_model import runner_of
from llamarium.runtime.runner import Runner
from llamarium.sampling.params import SamplingParams
from llamarium.tokenizer.base import Tokenizer
from llamarium.train.config import GRPOConfig
from llamarium.train.data.batch import IGNORED, AnswerBatch
from llamarium.train.data.order import derived_seed
from llamarium.train.data.prompts import Prompt, PromptRows
from llamarium.train.objectives.base import Trunk
from llamarium.train.objectives.logprobs import learned_logprobs
from llamarium.train.rewards.functions import Rewards
from llamarium.train.step import Evaluation, causal_trunk, computing_in, measured_rows

_ROWS_AT_ONCE = 4096  # rows per chunk when the embedding table is computed
_LEAST_SPREAD = 1e-6  # rewards of a group with a smaller standard deviation count as equal


@dataclass(slots=True)
class Answer:
    """A sampled answer to a prompt.

    Attributes:
        ids: Token ids, including the end token.
        logprobs: float32; log-probability of each token when it was sampled.
        is_cut: True if the answer was cut off at the maximum length.
        text: The decoded answer.
        reward: Weighted sum of the reward functions' values; NaN if it has no reward.
        parts: Value of each reward function, by name.
        advantage: Distance of the reward from the group's mean, in standard deviations; 0 without a reward.
    """

    ids: list[int]
    logprobs: list[float]
    is_cut: bool = True
    text: str = ""
    reward: float = math.nan
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    advantage: float = 0.0


@dataclass(frozen=True, slots=True)
class Group:
    """A prompt and its answers."""

    prompt: Prompt
    answers: Sequence[Answer]

    @property
    def rewards(self) -> NDArray[np.float64]:
        """Finite rewards of the answers."""
        return np.array([answer.reward for answer in self.answers if math.isfinite(answer.reward)])

    @property
    def spread(self) -> float:
        """Standard deviation of the rewards; 0 if they are equal."""
        deviation = float(self.rewards.std()) if len(self.rewards) else 0.0
        return deviation if deviation > _LEAST_SPREAD else 0.0

    def to_event(self) -> dict[str, Any]:
        """Return the group as JSON values for the journal."""
        answers: list[dict[str, Any]] = [
            {"text": a.text, "reward": _finite(a.reward), "advantage": a.advantage} for a in self.answers
        ]
        for answer, shown in zip(self.answers, answers, strict=True):
            if len(answer.parts) > 1:
                shown["parts"] = {name: _finite(value) for name, value in answer.parts.items()}
        return {"prompt": self.prompt.text, "answers": answers}


class Rollouts:
    """Samples and rewards the answers of a run.

    Args:
        config: Settings of the run.
        model: The policy, with adapters or fully trained.
        tokenizer: Decodes the answers.
        rows: Prompts for training.
        validation: Prompts for validation, or None.
        rewards: The reward functions.
        reference: The frozen reference model for KL; None without KL.

    Attributes:
        trunk: Computes the hidden states of the reference, by the same code as the policy's.

    Raises:
        OptionError: If `config.exact` is set without the C kernels.
        TrainingError: If `config.stop` is not one token.
    """

    def __init__(
        self,
        config: GRPOConfig,
        model: LlamaForCausalLM,
        tokenizer: Tokenizer,
        rows: PromptRows,
        validation: PromptRows | None,
        rewards: Rewards,
        reference: LlamaForCausalLM | None = None,
    ) -> None:
        self._config, self._model, self._tokenizer, self.rewards = config, model, tokenizer, rewards
        self._rows, self._validation, self._reference = rows, validation, reference
        stop = tokenizer.encode(config.stop, add_special_tokens=False) if config.stop else []
        if len(stop) > 1:
            raise TrainingError(
                f"stop is {show_value(config.stop)}, {counted(len(stop), 'token')}; expected a text of one token"
            )
        self._stop_ids = stop_ids_of(model.config, tokenizer, ()).union(stop)
        self.prompts_per_step, self.num_iterations = config.rows_per_step // config.group_size, config.num_iterations
        self.trunk: Trunk = causal_trunk
        self.groups: Sequence[Group] = ()
        self._batches: Sequence[AnswerBatch] = ()
        self.sampler = adapted_runner(self._model).name
        if config.exact and not adapted_runner(self._model).is_row_exact:
            raise OptionError(f"exact needs the C kernels, and {self.sampler} samples here; leave it out")

    def sample(self, places: Sequence[tuple[int, int]], step: int) -> tuple[list[AnswerBatch], dict[str, float]]:
        """Sample `group_size` answers to each prompt of a step, and return their batches and metrics.

        `places` are (epoch, index) of the prompts.
        """
        prompts = [self._rows.prompt(epoch, index) for epoch, index in places]
        seconds = self.rewards.seconds
        self.groups = groups = self._answered(prompts, self._config.group_size, step, temperature=1.0)
        if not any(len(group.rewards) for group in groups):
            raise TrainingError(
                f"no answer of step {step + 1} got a reward from {', '.join(self.rewards.names)}; see the warnings"
            )
        for group in groups:
            _set_advantages(group)
        answers = [answer for group in groups for answer in group.answers]
        spreads = [group.spread for group in groups]
        self._batches = self._batched(_rewarded(groups))
        return self._batches, {
            **self._summary(groups),
            "entropy": _entropy(answers),
            "reward_spread": sum(spreads) / len(groups),
            "equal_groups": spreads.count(0.0) / len(groups),
            "cut": sum(answer.is_cut for answer in answers) / len(answers),
            "rewards_failed": sum(math.isnan(answer.reward) for answer in answers),
            "reward_seconds": self.rewards.seconds - seconds,
        }

    def again(self) -> Sequence[AnswerBatch]:
        """Return the last step's batches for another update; with `exact`, recompute the log-probabilities in C."""
        if not self._config.exact:
            return self._batches
        parts = self._logprobs_in_c(self._model, _rewarded(self.groups))
        return [replace(batch, exact_N=part) for batch, part in zip(self._batches, parts, strict=True)]

    def has_signal(self) -> bool:
        """Return whether the last step has a learning signal: unequal rewards within a group, or non-zero KL.

        Otherwise the true gradient is zero, and a computed one is only rounding.
        """
        if any(group.spread for group in self.groups):
            return True
        pairs = () if self._reference is None else zip(
            self._model.parameters(), self._reference.parameters(), strict=True
        )  # fmt: skip
        return any(p.requires_grad and not torch.equal(p, q) for p, q in pairs)

    def evaluate(self) -> Evaluation:
        """Answer up to `eval_rows` validation prompts greedily; the loss is the negative mean reward."""
        assert self._validation is not None
        chosen = measured_rows(self._validation, self._config.eval_rows)
        groups = self._answered([self._validation.prompt(0, index) for index in chosen], 1, 0, temperature=0.0)
        evaluation = self._summary(groups)
        return Evaluation(-evaluation["reward"], evaluation)

    def to_event(self) -> dict[str, Any]:
        """Return the last step's group with the largest reward spread as JSON values."""
        return max(self.groups, key=lambda group: group.spread).to_event()

    def _summary(self, groups: Sequence[Group]) -> dict[str, float]:
        """Return the mean reward, the mean of each function if there are several, and the mean length in tokens."""
        answers = [answer for group in groups for answer in group.answers]
        names = self.rewards.names if len(self.rewards.names) > 1 else []
        return {
            "reward": _mean([answer.reward for answer in answers]),
            **{f"reward/{name}": _mean([a.parts.get(name, math.nan) for a in answers]) for name in names},
            "length": sum(len(answer.ids) for answer in answers) / len(answers),
        }

    def _answered(self, prompts: Sequence[Prompt], count: int, step: int, *, temperature: float) -> list[Group]:
        """Sample answers with a separate seed for each prompt and step, and reward them."""
        config, was_training = self._config, self._model.training
        params = [
            SamplingParams(
                max_tokens=config.max_tokens, temperature=temperature, top_k=0, top_p=1.0, n=count, logprobs=0,
                seed=derived_seed(f"answers {place}", config.seed, step) >> 32,
            )
            for place in range(len(prompts))
        ]  # fmt: skip
        groups = [Group(prompt, [Answer([], []) for _ in range(count)]) for prompt in prompts]
        self._model.eval()
        try:
            ids = [list(prompt.ids) for prompt in prompts]
            for event in generate_tokens(adapted_runner(self._model), ids, params, stop_ids=self._stop_ids):
                answer = groups[event.row // count].answers[event.row % count]
                if event.token_id < 0:
                    raise TrainingError("no token could be chosen: the logits are not finite")
                answer.ids.append(event.token_id)
                answer.logprobs.append(event.logprob)
                answer.is_cut = event.finish_reason != "stop"
        finally:
            self._model.train(was_training)
        for group in groups:
            for answer in group.answers:
                answer.text = self._tokenizer.decode(answer.ids if answer.is_cut else answer.ids[:-1])
            rewards = self.rewards.of_group([answer.text for answer in group.answers], group.prompt.row)
            for answer, (reward, parts) in zip(group.answers, rewards, strict=True):
                answer.reward, answer.parts = reward, parts
        return groups

    def _batched(self, rows: "Sequence[_Row]") -> list[AnswerBatch]:
        """Return batches of `batch_rows` answers, padded to the longest row of each batch.

        Reference log-probabilities are computed by the same code and in the same batch shapes as the policy's.
        """
        size, is_exact, reference = self._config.batch_rows, self._config.exact, self._reference
        batches = [_batch(rows[start : start + size]) for start in range(0, len(rows), size)]
        if is_exact:
            batches = [replace(batch, exact_N=batch.sampled_N) for batch in batches]
        if reference is None:
            return batches
        parts = self._logprobs_in_c(reference, rows) if is_exact else [self._logprobs(reference, b) for b in batches]
        return [replace(batch, reference_E=part) for batch, part in zip(batches, parts, strict=True)]

    @torch.no_grad()
    def _logprobs(self, reference: LlamaForCausalLM, batch: AnswerBatch) -> Tensor:
        """Return the log-probabilities of a batch's tokens under the reference, computed as in `train_step`."""
        with computing_in(reference.device, self._config.precision, as_pass=True):
            return learned_logprobs(reference, batch.to(reference.device), self.trunk).cpu()

    def _logprobs_in_c(self, model: LlamaForCausalLM, rows: "Sequence[_Row]") -> Sequence[Tensor]:
        """Return the answers' log-probabilities under the model's current weights, by the C kernels, per batch."""
        params = [SamplingParams(max_tokens=0, prompt_logprobs=0, temperature=0.0)] * len(rows)
        logprobs = [torch.empty(0)] * len(rows)
        ids = [[*prompt, *answer.ids] for prompt, answer in rows]
        for event in generate_tokens(adapted_runner(model), ids, params):
            assert event.prompt_scores is not None
            logprobs[event.row] = torch.from_numpy(event.prompt_scores.logprobs[len(rows[event.row][0]) :]).float()
        size = self._config.batch_rows
        return [torch.cat(logprobs[start : start + size]) for start in range(0, len(rows), size)]


_Row = tuple[Sequence[int], Answer]  # a prompt's token ids, and an answer


def _rewarded(groups: Sequence[Group]) -> list[_Row]:
    """Return the answers with a reward; others are not used in the update."""
    return [(group.prompt.ids, a) for group in groups for a in group.answers if math.isfinite(a.reward)]


def adapted_runner(model: LlamaForCausalLM) -> Runner:
    """Return a runner over the memory of a model in training, with its current weights."""
    runner = runner_over(model)
    if runner is None:
        return runner_of(model)
    embedding: object = model.model.embed_tokens
    if isinstance(embedding, LoRAEmbedding):
        runner = _with_table(runner, embedding)
    adapter = {name: _low_rank(linear) for name, linear in lora_linears(model)}
    return runner.with_adapters([adapter], default=0) if adapter else runner


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _mean(values: Sequence[float] | NDArray[np.float64]) -> float:
    """Return the mean of the finite values, NaN if there are none."""
    finite = [value for value in values if math.isfinite(value)]
    return float(np.mean(finite)) if finite else math.nan


def _entropy(answers: Sequence[Answer]) -> float:
    """Estimate the entropy of the distributions that the answers were sampled from, in nats per token.

    Sampling is at temperature 1 without filters, so the mean of -log P of the sampled tokens is unbiased.
    """
    logprobs = [logprob for answer in answers for logprob in answer.logprobs]
    return -sum(logprobs) / len(logprobs)


def _set_advantages(group: Group) -> None:
    """Set the advantages of a group's answers; they are 0 if the rewards are equal."""
    if group.spread:
        mean = group.rewards.mean()
        for answer in group.answers:
            if math.isfinite(answer.reward):
                answer.advantage = float((answer.reward - mean) / group.spread)


@torch.no_grad()
def _with_table(runner: Runner, embedding: LoRAEmbedding) -> Runner:
    """Return a runner with the adapted embedding table; a tied head keeps the base's weights."""
    ids = torch.arange(embedding.num_embeddings)
    with computing_in(ids.device, "float32", as_pass=True):  # the rows are bit-identical to training
        table = np.concatenate([embedding(part).float().numpy() for part in ids.split(_ROWS_AT_ONCE)])
    type_name = runner.weights["model.norm.weight"].type_name
    return replaced_in_c(
        runner, replace(runner.config, tie_word_embeddings=False), float_weights({EMBEDDING: table}, type_name)
    )


def _low_rank(linear: LoRALinear) -> LowRank:
    """Return the low-rank update of an adapted Linear, over the memory in training."""
    gain = None
    if linear.lora_magnitude_vector is not None:
        gain = (linear.lora_magnitude_vector / linear.row_norms()).detach().numpy()
    a, b = (part.weight.detach().numpy() for part in (linear.lora_A, linear.lora_B))
    return LowRank(linear.scale, a, b, gain)


def _batch(rows: Sequence[_Row]) -> AnswerBatch:
    """Return answers as rows, padded on the right, where causal attention ignores the padding."""
    shape = len(rows), max(len(prompt) + len(answer.ids) for prompt, answer in rows) - 1
    ids_BT, labels_BT = torch.zeros(shape, dtype=torch.int64), torch.full(shape, IGNORED)
    for b, (prompt, answer) in enumerate(rows):
        ids = torch.tensor([*prompt, *answer.ids])
        ids_BT[b, : len(ids) - 1] = ids[:-1]
        labels_BT[b, len(prompt) - 1 : len(ids) - 1] = ids[len(prompt) :]
    answers = [answer for _, answer in rows]
    return AnswerBatch(
        ids_BT, labels_BT, torch.arange(shape[1]).expand(shape), None,
        advantages_N=torch.tensor([a.advantage for a in answers for _ in a.ids], dtype=torch.float32),
        sampled_N=torch.tensor([logprob for a in answers for logprob in a.logprobs], dtype=torch.float32),
    )  # fmt: skip
