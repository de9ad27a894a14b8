"""The sampler's input and output: the state of a request, and the chosen token. Never torch."""

import math
import secrets
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamarium.errors import AnswerError, LogitsProcessorError, SamplingError
from llamarium.kernels import native
from llamarium.sampling.constraint import Constraint, NoToken
from llamarium.sampling.params import PARAMETERS, SamplingParams


class Chosen(NamedTuple):
    """One row's token of one step.

    Attributes:
        token_id: The token, or a `NoToken` below 0. Other rows are unaffected.
        logprob: Its log-probability under the model; NaN without `logprobs`.
        top: The `logprobs` most probable (id, logprob) pairs; the lowest ids among equals first.
    """

    token_id: int
    logprob: float = math.nan
    top: tuple[tuple[int, float], ...] = ()

    def id_of(self, row: int) -> int:
        """Return the token's id; `row` is the row's number, for the message; AnswerError if there is none."""
        if self.token_id < 0:
            raise AnswerError(f"row {row}: {NoToken(self.token_id).message}")
        return self.token_id


@dataclass(slots=True, eq=False)
class Penalties:
    """The distinct tokens of a row, and their counts in its answer.

    Attributes:
        ids: Shape (U,), int64, each token once: those of the prompt, then those of the answer alone.
        counts: Shape (U,), float32, in the answer.
    """

    ids: NDArray[np.int64]
    counts: NDArray[np.float32]
    _places: dict[int, int]

    @classmethod
    def of(cls, prompt_ids: Iterable[int], answer_ids: Iterable[int]) -> "Penalties":
        """Count the tokens of a row."""
        places = {token_id: place for place, token_id in enumerate(dict.fromkeys(prompt_ids))}
        ids = np.fromiter(places, np.int64, len(places))
        made = cls(ids, np.zeros(len(ids), np.float32), places)
        for token_id in answer_ids:
            made.add(token_id)
        return made

    def add(self, token_id: int) -> None:
        """Count one more token of the answer."""
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self.ids):
            self.ids = np.append(self.ids, token_id)
            self.counts = np.append(self.counts, np.float32(0))
        self.counts[place] += 1


class SamplingRow:
    """The sampling state of one answer.

    Attributes:
        params: With n 1.
        seed: Of the parameters, or a fresh one.
        num_tokens: Tokens of the answer so far.
        penalties: Token counts; None without penalties.
        constraint: The form of the answer, or None.
        choice: The parameters for C.
        history: The ids of prompt and answer so far, for the parameters' `logits_processor`; None without one.
        failure: Why that function ended the answer, or None.
        is_adjusted: Whether logits change before the choice: a processor, a bias, penalties, or a minimum of tokens.
    """

    __slots__ = (
        "_stops", "choice", "constraint", "failure", "history", "is_adjusted", "num_tokens", "params", "penalties",
        "seed",
    )  # fmt: skip

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        vocab_size: int,
        answer_ids: Sequence[int] = (),
        constraint: Constraint | None = None,
        stops: Iterable[int] = (),
    ) -> None:
        """Begin an answer, or resume one after `answer_ids`; `constraint` is at its beginning, for `params.grammar`.

        `stops` are the ids that end it, which may not come before `params.min_tokens`. SamplingError for n above 1, ids
        or counts outside the vocabulary, or where no token may come.
        """
        if params.n != 1:
            raise SamplingError(f"n is {params.n}; a row of the sampler is one answer: expected SamplingParams.rows()")
        if params.logprobs or params.prompt_logprobs or params.logit_bias:
            check_against_vocabulary(params, vocab_size)
        assert (constraint is None) == (params.grammar is None), "a grammar comes with its compiled form"
        self.params = params
        self.constraint = constraint
        self.seed = secrets.randbits(63) if params.seed is None else params.seed
        self.num_tokens = len(answer_ids)
        self.penalties = Penalties.of(prompt_ids, answer_ids) if params.penalizes else None
        self.history = None if params.logits_processor is None else array("q", [*prompt_ids, *answer_ids])
        self.failure: LogitsProcessorError | None = None
        asked = {name: getattr(params, name) for name in PARAMETERS if hasattr(native.CChoice, name)}
        asked["top_k"] = params.top_k if params.top_k < vocab_size else 0  # 0 where it keeps the whole vocabulary
        self.choice = native.CChoice(step=self.num_tokens, **asked | {"seed": self.seed})
        self._stops = [one for one in stops if one < vocab_size] if params.min_tokens else []
        if len({*self._stops}) == vocab_size:
            raise SamplingError(
                f"min_tokens is {params.min_tokens}, and every token of the vocabulary is in stop_token_ids or ends an "
                "answer anyway, so none may come first; expected fewer"
            )
        has_counts = self.penalties is not None or self.history is not None
        self.is_adjusted = has_counts or bool(params.logit_bias or self._stops)
        if constraint is not None:
            for token_id in answer_ids:
                constraint.accept(token_id)

    @property
    def excluded(self) -> list[int]:
        """The ids that may not come now, besides those that the form excludes."""
        return self._stops if self.num_tokens < self.params.min_tokens else []

    def add(self, token_id: int) -> None:
        """Append the next token of the answer."""
        self.num_tokens += 1
        self.choice.step = self.num_tokens
        if self.penalties is not None:
            self.penalties.add(token_id)
        if self.history is not None:
            self.history.append(token_id)
        if self.constraint is not None:
            self.constraint.accept(token_id)


def check_against_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Refuse parameters that name more tokens than there are.

    SamplingError if `logprobs`, `prompt_logprobs` or an id of `logit_bias` is outside the vocabulary.
    """
    for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if count is not None and count > vocab_size:
            raise SamplingError(f"{name} is {count}; expected at most the vocabulary's {vocab_size}")
    outside = [token_id for token_id in params.logit_bias if token_id >= vocab_size]
    if outside:
        raise SamplingError(f"logit_bias names token {outside[0]}; expected ids below the vocabulary's {vocab_size}")
