"""A learner's whole model: how far it is from the library's, in nats and in tokens a second."""

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llamarium.build.arguments import Source
from llamarium.build.folder.course import file_of
from llamarium.build.learner import Learner
from llamarium.build.passes import Pass
from llamarium.build.step import Function
from llamarium.build.steps import STEPS
from llamarium.generation.completion import stop_ids_of
from llamarium.inspect.numbers import log_softmax

if TYPE_CHECKING:
    from llamarium.api import Llama

PROMPT = "The capital of France is"
NUM_TOKENS = 12

MAX_NATS = 1e-4
"""Right functions are 4e-6 nats a token from the library inside SmolLM2, as float32 sums in another order are; the
smallest of the steps' mistakes that a distance shows, an eps outside of the root, 4e-4."""


@dataclass(frozen=True, slots=True)
class Whole:
    """What a learner's functions are all together.

    Attributes:
        text: How they continue `PROMPT`.
        library_text: How the library does.
        tokens_per_second: Of the functions.
        library_tokens_per_second: Of the library.
        nats: The mean distance of log P of a text's tokens from the library's; NaN if a function failed.
        error: What a function did instead of returning a result, or "".
    """

    text: str = ""
    library_text: str = ""
    tokens_per_second: float = 0.0
    library_tokens_per_second: float = 0.0
    nats: float = math.nan
    error: str = ""

    @property
    def passed(self) -> bool:
        """Whether all functions returned, and what they return together is the library's."""
        return not self.error and self.nats <= MAX_NATS


def functions_of(folder: Path) -> dict[str, Function]:
    """Return all of a learner's functions; LearnerError if one is missing."""
    return {step.name: Learner(step, folder / file_of(step)) for step in STEPS}


def whole(llama: "Llama", source: Source, folder: Path) -> Whole:
    """Let the functions in a learner's folder write a text and compare it with the library's, of a model in float32.

    LearnerError if one of them fails.
    """
    mine = functions_of(folder)
    text, rate = _write(source, mine)
    started = time.perf_counter()
    right = llama.generate(PROMPT, max_new_tokens=NUM_TOKENS, temperature=0.0)
    library_rate = len(right.completions[0].token_ids) / (time.perf_counter() - started)
    return Whole(text, right.text, round(rate, 2), round(library_rate, 2), _distance(llama, source, mine))


def _write(source: Source, mine: dict[str, Function]) -> tuple[str, float]:
    """Write with the learner's merges, loop, choice, cache and layers."""
    vocabulary = source.vocabulary()
    parts = [part for piece in vocabulary.cut(PROMPT) for part in mine["merge"](piece.encode(), vocabulary.rank)]
    ids = [vocabulary.ids[part] for part in parts]
    running = Pass(source.weights, mine)
    past, num_read = running.empty(), 0

    def next_logits(ids: list[int]) -> Any:
        nonlocal past, num_read
        logits_TV, past = running.logits(np.array(ids[num_read:]), past)
        num_read = len(ids)
        return logits_TV[-1]

    def greedy(logits_V: Any) -> int:
        return mine["choose"](logits_V, 0.0, 1.0, 0.0)

    stop_ids = sorted(stop_ids_of(source.weights.config, source.tokenizer, ()))
    started = time.perf_counter()
    new = mine["generate"](ids, source.bos_id, stop_ids, NUM_TOKENS, next_logits, greedy)
    seconds = time.perf_counter() - started
    return source.tokenizer.decode(list(map(int, new))), len(new) / seconds


def _distance(llama: "Llama", source: Source, mine: dict[str, Function]) -> float:
    """Return the mean absolute distance of log P of a text's tokens from the library's, in nats."""
    ids = np.array(source.tokenizer.encode(source.texts[0]))
    running = Pass(source.weights, mine)
    logits_TV, _ = running.logits(ids, running.empty())
    yours = log_softmax(logits_TV)[np.arange(len(ids) - 1), ids[1:]]
    theirs = np.array(llama.score(source.texts[0]).logprobs[1:], np.float64)
    return float(np.abs(yours - theirs).mean())
