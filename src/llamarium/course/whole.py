"""Compares a learner's whole model with the library, in nats and in tokens per second."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llamarium.course.arguments import Source
from llamarium.course.guard import LearnerError
from llamarium.course.learner import Learner
from llamarium.course.limits import Limits
from llamarium.course.outline import file_of
from llamarium.course.passes import RIGHT, Pass, Weights
from llamarium.course.step import Function
from llamarium.course.steps import STEPS
from llamarium.course.steps.types import Floats
from llamarium.generation.completion import stop_ids_of
from llamarium.inspect.numbers import log_softmax
from llamarium.inspect.score import score

if TYPE_CHECKING:
    from llamarium.api import Llama

PROMPT = "The capital of France is"
FURTHER_PROMPTS = "The capital of Japan is", "Water boils at"
"""Further prompts in the same process: one that shares the first one's length and prefix, and a shorter one."""

NUM_TOKENS, FURTHER_TOKENS = 12, 3

SLOW_S = 120.0
"""Functions that would take more CPU time than this run in a part of the model."""

PART_LAYERS, PART_TOKENS, PART_NEW = 2, 1000, 2
"""Size of that part: layers, vocabulary, and number of generated tokens. Plain Python loops take a minute per token of
SmolLM2, and 4 s per token in this part."""

CALL_LIMITS = 8
"""Factor on the time limit of a call, which is larger than in a step's check: all prompt tokens and all weights."""

MAX_NATS = 1e-4
"""Maximum distance to pass, in nats per token. In SmolLM2, right functions differ from the library by 4e-6 because of
the order of float32 sums; the mistake with the smallest visible effect, eps outside of the square root, by 4e-4."""


@dataclass(frozen=True, slots=True)
class Whole:
    """The comparison of a learner's whole model with the library.

    Attributes:
        text: The model's continuation of `PROMPT`.
        library_text: The library's continuation.
        tokens_per_second: Speed of the learner's functions.
        library_tokens_per_second: Speed of the library.
        nats: Mean absolute difference of the tokens' log-probabilities, the largest one of all prompts; NaN if a
            function failed.
        error: A function's failure, or a text that differs from the library's although the log-probabilities agree;
            else "".
        prompt: The prompt with the largest difference.
        is_slow: Whether the functions are so slow that they ran in a part of the model, compared with the right
            functions instead of the library.
    """

    text: str = ""
    library_text: str = ""
    tokens_per_second: float = 0.0
    library_tokens_per_second: float = 0.0
    nats: float = math.nan
    error: str = ""
    prompt: str = PROMPT
    is_slow: bool = False

    @property
    def passed(self) -> bool:
        """Whether all functions returned, and the model agrees with the library."""
        return not self.error and self.nats <= MAX_NATS


def functions_of(folder: Path, limits: Limits | None = None) -> dict[str, Function]:
    """Return all of a learner's functions by name; LearnerError if one is missing."""
    return {step.name: Learner(step, folder / file_of(step), limits) for step in STEPS}


def whole(llama: "Llama", source: Source, folder: Path, limits: Limits) -> Whole:
    """Generate texts with a learner's functions and compare them with the library's.

    Args:
        llama: The library's model, in float32.
        source: The same model's weights and tokenizer.
        folder: The learner's folder.
        limits: Limits of CPU time for a step's check.

    Raises:
        LearnerError: If a function fails.
    """
    mine = functions_of(folder, replace(limits, call_s=CALL_LIMITS * limits.call_s))
    part = replace(source, weights=_Part(source.weights))
    is_slow = _num_seconds(source, part, mine) > SLOW_S
    if is_slow:
        comparisons = [_compared_in_part(part, mine, prompt) for prompt in (PROMPT, *FURTHER_PROMPTS)]
    else:
        comparisons = [_compared(llama, source, mine, PROMPT, NUM_TOKENS)]
        comparisons += [_compared(llama, source, mine, prompt, FURTHER_TOKENS) for prompt in FURTHER_PROMPTS]
    worst = max(comparisons, key=lambda one: one.nats)
    error = ""
    for one in comparisons:
        if worst.nats <= MAX_NATS and one.text != one.library_text:
            error = f"continues {one.prompt!r} with {one.text!r}; the library with {one.library_text!r}"
    return replace(comparisons[0], nats=worst.nats, prompt=worst.prompt, error=error, is_slow=is_slow)


class _Part(Weights):
    """The first layers of a model, with an LM head for the first tokens of its vocabulary."""

    def __init__(self, weights: Weights) -> None:
        num_layers = min(PART_LAYERS, weights.config.num_hidden_layers)
        super().__init__(replace(weights.config, num_hidden_layers=num_layers), weights.__getitem__)

    @property
    def head(self) -> Floats:
        """The LM head (PART_TOKENS, D) of these tokens."""
        return super().head[:PART_TOKENS]


def _num_seconds(source: Source, part: Source, mine: dict[str, Function]) -> float:
    """Estimate the CPU time of the functions in the whole model, in seconds, from a token in a part of the model."""
    running, ids = Pass(part.weights, mine), np.array(source.tokenizer.encode(PROMPT)[:1])
    Pass(part.weights).logits(ids, running.empty())  # reads the weights, so that this is not timed
    started = time.process_time()
    hidden_TD, _ = running.hidden(ids, running.empty())
    of_layers = time.process_time() - started
    mine["head"](hidden_TD, part.weights.head)
    of_head = time.process_time() - started - of_layers
    of_layers *= source.weights.config.num_hidden_layers / part.weights.config.num_hidden_layers
    of_head *= len(source.weights.head) / len(part.weights.head)
    num_read = sum(len(source.tokenizer.encode(prompt)) for prompt in (PROMPT, *FURTHER_PROMPTS))
    return (of_layers + of_head) * (num_read + NUM_TOKENS + FURTHER_TOKENS * len(FURTHER_PROMPTS))


def _compared_in_part(part: Source, mine: dict[str, Function], prompt: str) -> Whole:
    """Continue a prompt with the learner's and the right functions in a part of the model."""
    written, right = _Writing(part, mine), _Writing(part, RIGHT)
    started = time.perf_counter()
    text = written.text(prompt, PART_NEW)
    rate = written.num_new / (time.perf_counter() - started)
    started = time.perf_counter()
    right_text = right.text(prompt, PART_NEW)
    right_rate = right.num_new / (time.perf_counter() - started)
    return Whole(text, right_text, round(rate, 2), round(right_rate, 2), written.distance_from(right), prompt=prompt)


def _compared(llama: "Llama", source: Source, mine: dict[str, Function], prompt: str, num_tokens: int) -> Whole:
    """Continue a prompt with the learner's functions and the library."""
    written = _Writing(source, mine)
    started = time.perf_counter()
    text = written.text(prompt, num_tokens)
    rate = written.num_new / (time.perf_counter() - started)
    started = time.perf_counter()
    right = llama.generate(prompt, max_new_tokens=num_tokens, temperature=0.0)
    library_rate = len(right.completions[0].token_ids) / (time.perf_counter() - started)
    return Whole(text, right.text, round(rate, 2), round(library_rate, 2), written.distance(llama), prompt=prompt)


class _Writing:
    """Generates text with the learner's merges, loop, sampling, KV cache and layers, and keeps the logits."""

    def __init__(self, source: Source, mine: Mapping[str, Function]) -> None:
        self._source, self._mine = source, mine
        self._running = Pass(source.weights, mine)
        self._past = self._running.empty()
        self._ids: list[int] = []
        self._logits: list[Floats] = []
        self.num_new = 0

    def text(self, prompt: str, num_tokens: int) -> str:
        """Return the continuation of a prompt by up to `num_tokens` tokens; LearnerError if a function fails."""
        source, mine = self._source, self._mine
        vocabulary = source.vocabulary()
        parts = [part for piece in vocabulary.cut(prompt) for part in mine["merge"](piece.encode(), vocabulary.rank)]
        ids = [vocabulary.ids[part] for part in parts]
        stop_ids = sorted(stop_ids_of(source.weights.config, source.tokenizer, ()))
        new = mine["generate"](ids, source.bos_id, stop_ids, num_tokens, self._next_logits, self._greedy)
        self.num_new = len(new)
        return source.tokenizer.decode(list(map(int, new)))

    def distance(self, llama: "Llama") -> float:
        """Return the mean absolute difference of the tokens' log-probabilities from the library's, in nats."""
        ids = np.array(self._ids)
        yours = log_softmax(np.concatenate(self._logits)[: len(ids) - 1])[np.arange(len(ids) - 1), ids[1:]]
        theirs = np.array(score(llama.runner, self._ids).logprobs[1:], np.float64)
        return float(np.abs(yours - theirs).mean())

    def distance_from(self, right: "_Writing") -> float:
        """Return the mean absolute difference of all log-probabilities from another generation's, in nats."""
        mine, others = (log_softmax(np.concatenate(one._logits)) for one in (self, right))
        num_rows = min(len(mine), len(others))  # one text may be shorter
        return float(np.abs(mine[:num_rows] - others[:num_rows]).mean())

    def _next_logits(self, ids: list[int]) -> Any:
        ids = list(map(int, ids))
        if ids[: len(self._ids)] != self._ids or len(ids) == len(self._ids):
            raise LearnerError("differs", "generate: calls the model with ids that do not continue the text so far")
        logits_TV, self._past = self._running.logits(np.array(ids[len(self._ids) :]), self._past)
        self._ids = ids
        self._logits.append(logits_TV)
        return logits_TV[-1]

    def _greedy(self, logits_V: Any) -> int:
        return self._mine["choose"](logits_V, 0.0, 1.0, 0.0)
