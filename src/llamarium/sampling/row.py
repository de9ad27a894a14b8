"""The sampler's input and output: the sampling state of an answer, and the sampled token. Torch-free."""

import math
import secrets
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamarium.errors import AnswerError, LogitsProcessorError, SamplingError
from llamarium.kernels import structs
from llamarium.sampling.constraint import Constraint, NoToken
from llamarium.sampling.params import PARAMETERS, SamplingParams


class Chosen(NamedTuple):
    """A row's token of one step.

    Attributes:
        token_id: The token, or a negative `NoToken`; other rows are unaffected.
        logprob: Its log-probability under the model; NaN without `logprobs`.
        top: The `logprobs` most likely (id, logprob) pairs; among equals, lower ids first.
    """

    token_id: int
    logprob: float = math.nan
    top: tuple[tuple[int, float], ...] = ()

    def id_of(self, row: int) -> int:
        """Return the token id; AnswerError, which names `row`, if there is none."""
        if self.token_id < 0:
            raise AnswerError(f"row {row}: {NoToken(self.token_id).message}")
        return self.token_id


@dataclass(slots=True, eq=False)
class Penalties:
    """The distinct tokens of a row and their counts, for penalties.

    Attributes:
        ids: int64 (U,), each token once: those of the prompt, then the answer's new ones.
        counts: float32 (U,), occurrences in the answer.
    """

    ids: NDArray[np.int64]
    counts: NDArray[np.float32]
    _places: dict[int, int]

    @classmethod
    def of(cls, prompt_ids: Iterable[int], answer_ids: Iterable[int]) -> "Penalties":
        """Return the counts for a prompt and the answer so far."""
        places = {token_id: index for index, token_id in enumerate(dict.fromkeys(prompt_ids))}
        ids = np.fromiter(places, np.int64, len(places))
        penalties = cls(ids, np.zeros(len(ids), np.float32), places)
        for token_id in answer_ids:
            penalties.add(token_id)
        return penalties

    def add(self, token_id: int) -> None:
        """Count a token of the answer."""
        index = self._places.setdefault(token_id, len(self._places))
        if index == len(self.ids):
            self.ids = np.append(self.ids, token_id)
            self.counts = np.append(self.counts, np.float32(0))
        self.counts[index] += 1


class SamplingRow:
    """The sampling state of one answer.

    Attributes:
        params: Sampling parameters, with n 1.
        seed: The seed of the parameters, or a random one.
        num_tokens: Tokens of the answer so far.
        penalties: Token counts; None without penalties.
        constraint: Constrained decoding, or None.
        choice: The parameters as a C struct.
        history: Ids of prompt and answer so far, for the `logits_processor`; None without one.
        failure: The error of the `logits_processor` that ended the answer, or None.
        is_adjusted: Whether logits change before sampling: by a processor, biases, penalties or `min_tokens`.
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
        """Start an answer, or resume one after `answer_ids`.

        Args:
            params: Sampling parameters, with n 1.
            prompt_ids: Ids of the prompt.
            vocab_size: V.
            answer_ids: Ids of the answer so far.
            constraint: The constraint of `params.grammar`, at the start of the answer.
            stops: Ids that end the answer; excluded until it has `params.min_tokens` tokens.

        Raises:
            SamplingError: If n is not 1, an id or count is outside the vocabulary, or no token is allowed.
        """
        if params.n != 1:
            raise SamplingError(f"n is {params.n}; expected 1 here: use SamplingParams.rows() for several answers")
        if params.logprobs or params.prompt_logprobs or params.logit_bias:
            check_against_vocabulary(params, vocab_size)
        assert (constraint is None) == (params.grammar is None), "a grammar needs its constraint"
        self.params = params
        self.constraint = constraint
        self.seed = secrets.randbits(63) if params.seed is None else params.seed
        self.num_tokens = len(answer_ids)
        self.penalties = Penalties.of(prompt_ids, answer_ids) if params.penalizes else None
        self.history = None if params.logits_processor is None else array("q", [*prompt_ids, *answer_ids])
        self.failure: LogitsProcessorError | None = None
        fields = {name: getattr(params, name) for name in PARAMETERS if hasattr(structs.CChoice, name)}
        fields["top_k"] = params.top_k if params.top_k < vocab_size else 0  # 0 is off
        self.choice = structs.CChoice(step=self.num_tokens, **fields | {"seed": self.seed})
        self._stops = [stop_id for stop_id in stops if stop_id < vocab_size] if params.min_tokens else []
        if len({*self._stops}) == vocab_size:
            raise SamplingError(
                f"min_tokens is {params.min_tokens}, but every token of the vocabulary is a stop token; reduce "
                "stop_token_ids, or leave out min_tokens"
            )
        has_counts = self.penalties is not None or self.history is not None
        self.is_adjusted = has_counts or bool(params.logit_bias or self._stops)
        if constraint is not None:
            for token_id in answer_ids:
                constraint.accept(token_id)

    @property
    def excluded(self) -> list[int]:
        """The ids that `min_tokens` excludes now."""
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
    """Validate counts and ids against the vocabulary.

    Raises:
        SamplingError: If `logprobs`, `prompt_logprobs` or an id of `logit_bias` exceeds it.
    """
    for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if count is not None and count > vocab_size:
            raise SamplingError(f"{name} is {count}; expected at most {vocab_size}, the size of the vocabulary")
    too_large = [token_id for token_id in params.logit_bias if token_id >= vocab_size]
    if too_large:
        raise SamplingError(
            f"logit_bias has token id {too_large[0]}; expected less than {vocab_size}, the size of the vocabulary"
        )
