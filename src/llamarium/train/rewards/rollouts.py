"""Rollouts: sample groups of answers from the model that is trained, reward them, and make batches of them.

On a CPU the C kernels sample, over the very memory that the optimizer updates: there is no second copy of a weight, and
nothing is exported. A model that they cannot run (NF4, a GPU) samples through its modules. Answers follow from the
run's seed, the step and the weights, so a run that is resumed samples what one that was not killed samples.
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

_ROWS_AT_ONCE = 4096  # of an embedding table that is computed
_LEAST_SPREAD = 1e-6  # of a group's rewards; below, they are equal, and none is better than the others


@dataclass(slots=True)
class Answer:
    """One answer to a prompt.

    Attributes:
        ids: Its tokens, the one that ends it included.
        logprobs: float32; log P of each in the pass that sampled it.
        is_cut: Whether it ended by its length.
        reward: The weighted sum of what the functions gave; NaN where it has no reward.
        parts: What each function gave, by its name.
        advantage: Its reward's distance from the group's mean, in standard deviations; 0 without a reward.
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
        """Those that there are."""
        return np.array([answer.reward for answer in self.answers if math.isfinite(answer.reward)])

    @property
    def spread(self) -> float:
        """The standard deviation of its rewards; 0 where they are equal."""
        found = float(self.rewards.std()) if len(self.rewards) else 0.0
        return found if found > _LEAST_SPREAD else 0.0

    def to_event(self) -> dict[str, Any]:
        """Return it as JSON values for the journal."""
        answers: list[dict[str, Any]] = [
            {"text": a.text, "reward": _finite(a.reward), "advantage": a.advantage} for a in self.answers
        ]
        for answer, shown in zip(self.answers, answers, strict=True):
            if len(answer.parts) > 1:
                shown["parts"] = {name: _finite(value) for name, value in answer.parts.items()}
        return {"prompt": self.prompt.text, "answers": answers}


class Rollouts:
    """Samples and rewards a run's answers.

    OptionError if `config.exact` is on without the C kernels; TrainingError if `config.stop` is not one token.

    Args:
        model: The policy; with adapters, or trained whole.
        reference: The model as it was, frozen, from which KL is measured; None without.

    Attributes:
        trunk: What computes hidden states of the reference; the run's own, as the policy's.
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
        """Answer the prompts of a step, `group_size` times each; return their batches and what to report.

        `places` are epochs and indices of prompts.
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
        """Return the last step's batches for another update: if `exact`, with log P in C over the weights of now."""
        if not self._config.exact:
            return self._batches
        parts = self._logprobs_in_c(self._model, _rewarded(self.groups))
        return [replace(batch, exact_N=part) for batch, part in zip(self._batches, parts, strict=True)]

    def has_signal(self) -> bool:
        """Whether the last step's answers can teach anything: some group has unequal rewards, or KL is not zero.

        Where neither holds the gradient is zero, and what a pass makes of it is rounding.
        """
        if any(group.spread for group in self.groups):
            return True
        pairs = () if self._reference is None else zip(
            self._model.parameters(), self._reference.parameters(), strict=True
        )  # fmt: skip
        return any(p.requires_grad and not torch.equal(p, q) for p, q in pairs)

    def evaluate(self) -> Evaluation:
        """Answer held-out prompts, `eval_rows` at most, greedily; the loss is minus the mean reward."""
        assert self._validation is not None
        chosen = measured_rows(self._validation, self._config.eval_rows)
        groups = self._answered([self._validation.prompt(0, index) for index in chosen], 1, 0, temperature=0.0)
        found = self._summary(groups)
        return Evaluation(-found["reward"], found)

    def to_event(self) -> dict[str, Any]:
        """Return the last step's group with the largest spread as JSON values."""
        return max(self.groups, key=lambda group: group.spread).to_event()

    def _summary(self, groups: Sequence[Group]) -> dict[str, float]:
        """Return the means of rewards, of each function's where there are several, and of the answers' tokens."""
        answers = [answer for group in groups for answer in group.answers]
        names = self.rewards.names if len(self.rewards.names) > 1 else []
        return {
            "reward": _mean([answer.reward for answer in answers]),
            **{f"reward/{name}": _mean([a.parts.get(name, math.nan) for a in answers]) for name in names},
            "length": sum(len(answer.ids) for answer in answers) / len(answers),
        }

    def _answered(self, prompts: Sequence[Prompt], count: int, step: int, *, temperature: float) -> list[Group]:
        """Sample answers, with a seed of its own for each prompt of each step, and reward them."""
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
        """Return the step's batches: each of `batch_rows` answers, as wide as its longest row.

        Log P under the reference comes from the same code, over batches of the same shape, as that of the policy.
        """
        size, is_exact, reference = self._config.batch_rows, self._config.exact, self._reference
        made = [_batch(rows[start : start + size]) for start in range(0, len(rows), size)]
        if is_exact:
            made = [replace(batch, exact_N=batch.sampled_N) for batch in made]
        if reference is None:
            return made
        parts = self._logprobs_in_c(reference, rows) if is_exact else [self._logprobs(reference, b) for b in made]
        return [replace(batch, reference_E=part) for batch, part in zip(made, parts, strict=True)]

    @torch.no_grad()
    def _logprobs(self, reference: LlamaForCausalLM, batch: AnswerBatch) -> Tensor:
        """Return log P of a batch's tokens under the reference, as `train_step` computes the policy's."""
        with computing_in(reference.device, self._config.precision, as_pass=True):
            return learned_logprobs(reference, batch.to(reference.device), self.trunk).cpu()

    def _logprobs_in_c(self, model: LlamaForCausalLM, rows: "Sequence[_Row]") -> Sequence[Tensor]:
        """Return log P of the answers' tokens in C, over a model's weights as they are now: a part for each batch."""
        params = [SamplingParams(max_tokens=0, prompt_logprobs=0, temperature=0.0)] * len(rows)
        found = [torch.empty(0)] * len(rows)
        ids = [[*prompt, *answer.ids] for prompt, answer in rows]
        for event in generate_tokens(adapted_runner(model), ids, params):
            assert event.prompt_scores is not None
            found[event.row] = torch.from_numpy(event.prompt_scores.logprobs[len(rows[event.row][0]) :]).float()
        size = self._config.batch_rows
        return [torch.cat(found[start : start + size]) for start in range(0, len(rows), size)]


_Row = tuple[Sequence[int], Answer]  # a prompt's tokens, and an answer to it


def _rewarded(groups: Sequence[Group]) -> list[_Row]:
    """Return the answers that got a reward; the others are no part of an update."""
    return [(group.prompt.ids, a) for group in groups for a in group.answers if math.isfinite(a.reward)]


def adapted_runner(model: LlamaForCausalLM) -> Runner:
    """Return a runner over the memory of a model that is trained, as it is now."""
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
    """Return the mean of those that are finite, NaN if there are none."""
    finite = [value for value in values if math.isfinite(value)]
    return float(np.mean(finite)) if finite else math.nan


def _entropy(answers: Sequence[Answer]) -> float:
    """Estimate the entropy of the distributions that the answers were sampled from, in nats a token.

    Answers are sampled from the distributions as they are, so the mean of -log P of their tokens is right on average.
    """
    logprobs = [logprob for answer in answers for logprob in answer.logprobs]
    return -sum(logprobs) / len(logprobs)


def _set_advantages(group: Group) -> None:
    """Compare each reward with its group's; all are 0 where the rewards are equal."""
    if group.spread:
        mean = group.rewards.mean()
        for answer in group.answers:
            if math.isfinite(answer.reward):
                answer.advantage = float((answer.reward - mean) / group.spread)


@torch.no_grad()
def _with_table(runner: Runner, embedding: LoRAEmbedding) -> Runner:
    """Return a runner with the corrected embedding table, which the kernels look up; a tied head stays the base's."""
    ids = torch.arange(embedding.num_embeddings)
    with computing_in(ids.device, "float32", as_pass=True):  # the rows have the bits that training computes
        table = np.concatenate([embedding(part).float().numpy() for part in ids.split(_ROWS_AT_ONCE)])
    type_name = runner.weights["model.norm.weight"].type_name
    return replaced_in_c(
        runner, replace(runner.config, tie_word_embeddings=False), float_weights({EMBEDDING: table}, type_name)
    )


def _low_rank(linear: LoRALinear) -> LowRank:
    """Return an adapted Linear's correction over the memory that is trained."""
    gain = None
    if linear.lora_magnitude_vector is not None:
        gain = (linear.lora_magnitude_vector / linear.row_norms()).detach().numpy()
    a, b = (part.weight.detach().numpy() for part in (linear.lora_A, linear.lora_B))
    return LowRank(linear.scale, a, b, gain)


def _batch(rows: Sequence[_Row]) -> AnswerBatch:
    """Return answers as rows, which are filled up on the right, where no earlier token sees it."""
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
