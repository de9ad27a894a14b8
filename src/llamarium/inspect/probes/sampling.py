"""From logits to a token: what each step of the sampler leaves, and the draw.

The steps are the sampler's own (`sampling/steps.py` says what each does), and the token is the one that it chooses:
that of an answer with the same parameters and seed.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llamarium.inspect.forward import Memory, advance
from llamarium.inspect.numbers import JsonView, as_array, largest, softmax
from llamarium.inspect.shapes import check_whole
from llamarium.inspect.tokens import check_count, check_ids, text_of
from llamarium.runtime.runner import CacheDtype, Logits, Runner
from llamarium.sampling.constraint import Constraint
from llamarium.sampling.params import SamplingParams
from llamarium.sampling.row import SamplingRow
from llamarium.sampling.sampler import Sampler
from llamarium.sampling.steps import Stage, noise, stages
from llamarium.tokenizer.base import Tokenizer


@dataclass(frozen=True, slots=True)
class SamplerCandidate:
    """A token that a step has kept.

    Attributes:
        logit: After the step; from "temperature" on less the largest, and divided by the temperature.
        probability: Among the kept ones.
    """

    token_id: int
    logit: float
    probability: float
    text: str | None = None


@dataclass(frozen=True, slots=True)
class SamplerStep:
    """The logits after one step.

    Attributes:
        name: "logits" (the model's own), "logits_processor" if there is one, "logit_bias", "penalties", "grammar",
            "temperature", then the filters as parameters are called, in the order of `sampling/steps.py`; at
            temperature 0 nothing follows "grammar".
        is_on: Whether the parameters enable it.
        num_left: Number of tokens it keeps.
        candidates: The most probable of them, the best first; the chosen token stands last if it is not among them.
    """

    name: str
    is_on: bool
    num_left: int
    candidates: tuple[SamplerCandidate, ...]


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token in the draw: the largest total wins.

    Attributes:
        noise: -log(-log(u)) of its own u, which follows from seed, place and id.
        total: The last step's logit and the noise.
    """

    token_id: int
    noise: float
    total: float
    text: str | None = None


@dataclass(frozen=True, slots=True)
class SamplerSteps(JsonView):
    """How one token of an answer was chosen.

    Attributes:
        seed: Of the noise.
        place: Tokens of the answer before it.
        draw: The candidates of the last step with their noise; None at temperature 0, where the largest logit wins.
    """

    token_id: int
    text: str | None
    seed: int
    place: int
    steps: tuple[SamplerStep, ...]
    draw: tuple[Drawn, ...] | None


def sampler_steps(
    runner: Runner,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    *,
    answer_ids: Sequence[int] = (),
    constraint: Constraint | None = None,
    stops: Collection[int] = (),
    k: int = 10,
    tokenizer: Tokenizer | None = None,
) -> SamplerSteps:
    """Run a prompt, and follow how the next token of its answer is chosen; see `Inspector.sampler_steps`.

    `params` have n 1; penalties count `answer_ids` apart from the prompt's; `constraint` is the answer's grammar at its
    beginning, where `params` have one; `stops` are the ids that end it.

    Raises:
        InputError: For invalid ids, or a `k` outside the vocabulary.
        ContextLengthError: If there are more ids than the context holds.
        SamplingError: If the parameters request more than one answer, or name ids outside the vocabulary.
        AnswerError: If no token can be chosen.
    """
    check_count(k, "k", runner.config.vocab_size)
    check_whole(answer_ids, "answer_ids")
    check_ids(runner.config, prompt_ids)
    check_ids(runner.config, [*prompt_ids, *answer_ids])
    row = SamplingRow(params, prompt_ids, runner.config.vocab_size, answer_ids, constraint, stops)
    return explain_choice(row, next_logits(runner, prompt_ids, answer_ids), k, tokenizer)


def explain_choice(row: SamplingRow, logits_V: Logits, k: int = 10, tokenizer: Tokenizer | None = None) -> SamplerSteps:
    """Follow how the sampler chooses a row's next token from the runner's logits, and append it to the row.

    AnswerError if no token can be chosen.
    """
    place, row_stages = row.num_tokens, list(stages(row, as_array(logits_V)))
    if row.failure is not None:
        raise row.failure
    noise_V = noise(row, len(logits_V)) if row.params.temperature > 0 else None
    chosen = Sampler(len(logits_V)).sample([row], logits_V[None])[0].id_of(0)
    steps = tuple(_step(stage, k, chosen, tokenizer) for stage in row_stages)
    draw = None if noise_V is None else _draw(steps[-1], noise_V)
    return SamplerSteps(chosen, text_of(chosen, tokenizer), row.seed, place, steps, draw)


def _step(stage: Stage, k: int, chosen: int, tokenizer: Tokenizer | None) -> SamplerStep:
    logits_V = stage.logits_V
    num_left = int((logits_V > -np.inf).sum())
    ids = largest(logits_V, min(k, num_left)).tolist()
    ids = ids if chosen in ids else [*ids, chosen]
    values = zip(ids, logits_V[ids].tolist(), softmax(logits_V)[ids].tolist(), strict=True)
    candidates = tuple(SamplerCandidate(i, logit, p, text_of(i, tokenizer)) for i, logit, p in values)
    return SamplerStep(stage.name, stage.is_on, num_left, candidates)


def _draw(last: SamplerStep, noise_V: NDArray[np.float64]) -> tuple[Drawn, ...]:
    pairs = zip(last.candidates, noise_V[[c.token_id for c in last.candidates]].tolist(), strict=True)
    return tuple(Drawn(c.token_id, g, c.logit + g, c.text) for c, g in pairs)


def next_logits(
    runner: Runner,
    prompt_ids: Sequence[int],
    answer_ids: Sequence[int] = (),
    *,
    adapter: int = -1,
    kv_cache_dtype: CacheDtype = "auto",
) -> Logits:
    """Return the logits after the last token, as an answer has them: (V,).

    The modules round a batch of tokens differently from single ones; there the answer is run as it was made.
    """
    num_tokens = len(prompt_ids) + len(answer_ids)
    memory = Memory(runner, num_tokens, kv_cache_dtype)
    sequence = memory.begin(prompt_ids, num_tokens, adapter)
    if runner.is_row_exact:
        sequence.ids.extend(answer_ids)
        return advance(runner, memory.cache, [sequence])[0]
    logits_1V = advance(runner, memory.cache, [sequence])
    for token_id in answer_ids:
        sequence.ids.append(token_id)
        logits_1V = advance(runner, memory.cache, [sequence])
    return logits_1V[0]
