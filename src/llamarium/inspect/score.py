"""The probability of a text, token by token.

By the chain rule it is the product of the tokens' probabilities: log P(w_1 ... w_n) = sum over i of
log P(w_i | w_<i). Perplexity is the inverse of their geometric mean: the number of equally likely tokens that would be
as hard to predict.

The first token has nothing before it and so no probability. A model with a begin-of-sequence token puts that first,
and then every token of the text has one.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamarium.inspect.forward import logits_of
from llamarium.inspect.numbers import Floats, JsonView
from llamarium.inspect.tokens import check_ids, check_logits
from llamarium.runtime.runner import Runner
from llamarium.sampling.sampler import Sampler
from llamarium.tokenizer.base import Tokenizer


@dataclass(frozen=True, slots=True)
class TokenScore:
    """One token of the text.

    Attributes:
        logprob: log P(token | those before), natural; None for the first. Equal to the one reported with an answer's
            own tokens, where its bits do (`Runner.is_row_exact`).
        rank: 1 if no other token was more probable, 2 if one was, ...; None where `logprob` is.
    """

    token_id: int
    logprob: float | None
    rank: int | None
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Score(JsonView):
    """The probability of a text; `tokens` are in order, BOS included."""

    computed = "total_logprob", "perplexity"

    tokens: tuple[TokenScore, ...]

    @property
    def logprobs(self) -> tuple[float | None, ...]:
        """The log P(w_i | w_<i) of each token; None for the first."""
        return tuple(token.logprob for token in self.tokens)

    @property
    def num_scored(self) -> int:
        """Tokens that have a probability."""
        return len(self.tokens) - 1

    @property
    def total_logprob(self) -> float:
        """The logarithm of the product of the chain; 0 for a single token, the empty product."""
        return math.fsum(token.logprob for token in self.tokens if token.logprob is not None)

    @property
    def perplexity(self) -> float | None:
        """exp(-mean logprob); None for a single token."""
        if self.num_scored == 0:
            return None
        return e_to_the(-self.total_logprob / self.num_scored)


def e_to_the(mean_nats: float) -> float:
    """Return the perplexity of a mean of -log P; e^710 is no float64, and so infinite."""
    return math.inf if mean_nats > 709 else math.exp(mean_nats)


def score(runner: Runner, ids: Sequence[int]) -> Score:
    """Score one text.

    Args:
        runner: Executes the model.
        ids: Its token ids, with BOS first if the model has one.

    Raises:
        InputError: If there are none, or ids outside the vocabulary.
        ContextLengthError: If there are more than the context holds.
        AnswerError: If the model's logits are not finite.
    """
    known = check_ids(runner.config, ids)
    scored = [TokenScore(known[0], None, None)]
    sampler = Sampler(runner.config.vocab_size)
    for logits_CV in logits_of(runner, known[:-1]) if len(known) > 1 else ():
        check_logits(logits_CV)
        ids = known[len(scored) : len(scored) + len(logits_CV)]
        (found,) = scored_tokens([logits_CV], ids)
        logprobs = [sampler.logprobs(*row, 0).logprob for row in zip(logits_CV, ids, strict=True)]
        scored += map(TokenScore, ids, logprobs, found.ranks_C.tolist())
    return Score(tuple(scored))


def score_text(runner: Runner, tokenizer: Tokenizer, text: str) -> Score:
    """Score a text, BOS put first where the tokenizer has one, with each token's piece.

    Raises:
        TokenizerError: If the text cannot be encoded.
        InputError: If it has no tokens.
        ContextLengthError: If it has more than the context holds.
    """
    found = score(runner, tokenizer.encode(text))
    return Score(tuple(replace(token, text=tokenizer.token_text(token.token_id)) for token in found.tokens))


class ScoredTokens(NamedTuple):
    """A model's predictions of C tokens that followed.

    Attributes:
        ids_C: int64; the tokens.
        logprobs_C: float32; log P(token | those before), natural.
        ranks_C: int64; 1 where no other token was more probable.
        greedy_C: bool; whether greedy decoding would have chosen the token.
    """

    ids_C: NDArray[np.int64]
    logprobs_C: Floats
    ranks_C: NDArray[np.int64]
    greedy_C: NDArray[np.bool_]


def scored_tokens(logits: Iterable[Floats], next_ids: Sequence[int]) -> Iterator[ScoredTokens]:
    """Score the tokens that followed: (C, V) float32 logits, a few rows at a time as `logits_of` yields them."""
    start = 0
    for logits_CV in logits:
        ids_C = np.array(next_ids[start : start + len(logits_CV)], np.int64)
        start += len(logits_CV)
        chosen_C1 = logits_CV[np.arange(len(ids_C)), ids_C, None]
        ranks_C = (logits_CV > chosen_C1).sum(-1) + 1
        max_C1 = logits_CV.max(-1, keepdims=True)
        logprobs_C = (chosen_C1 - max_C1)[:, 0] - np.log(np.exp(logits_CV - max_C1).sum(-1))
        yield ScoredTokens(ids_C, logprobs_C, ranks_C, logits_CV.argmax(-1) == ids_C)
