"""The probability of a text, token by token.

By the chain rule it is the product of the tokens' probabilities: log P(w_1 ... w_n) = sum over i of
log P(w_i | w_<i). Perplexity is the inverse of their geometric mean: the number of equally likely tokens that would be
as hard to predict.

The first token has no context, and so no probability. If the model has a BOS token, it is prepended, and every token of
the text has a probability.
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
        token_id: Id of the token.
        logprob: log P(token | context), natural; None for the first. Bit-identical to the logprob that generation
            reports if `Runner.is_row_exact`.
        rank: Rank among all tokens, 1 for the most likely; None for the first token.
        text: The token's text, or None without a tokenizer.
    """

    token_id: int
    logprob: float | None
    rank: int | None
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Score(JsonView):
    """The log-probabilities of a text's tokens, in order, including BOS."""

    computed = "total_logprob", "perplexity"

    tokens: tuple[TokenScore, ...]

    @property
    def logprobs(self) -> tuple[float | None, ...]:
        """Log-probability log P(w_i | w_<i) of each token; None for the first."""
        return tuple(token.logprob for token in self.tokens)

    @property
    def num_scored(self) -> int:
        """Number of tokens with a probability."""
        return len(self.tokens) - 1

    @property
    def total_logprob(self) -> float:
        """Sum of the log-probabilities; 0 for a single token."""
        return math.fsum(token.logprob for token in self.tokens if token.logprob is not None)

    @property
    def perplexity(self) -> float | None:
        """exp(-mean logprob); None for a single token."""
        if self.num_scored == 0:
            return None
        return e_to_the(-self.total_logprob / self.num_scored)


def e_to_the(mean_nats: float) -> float:
    """Return the perplexity for a mean of -log P in nats; infinite above the range of float64."""
    return math.inf if mean_nats > 709 else math.exp(mean_nats)


def score(runner: Runner, ids: Sequence[int]) -> Score:
    """Score one text.

    Args:
        runner: Executes the model.
        ids: Its token ids, beginning with BOS if the model has one.

    Raises:
        InputError: If there are no ids, or some are outside the vocabulary.
        ContextLengthError: If there are more than the context length.
        AnswerError: If the model's logits are not finite.
    """
    token_ids = check_ids(runner.config, ids)
    scored = [TokenScore(token_ids[0], None, None)]
    sampler = Sampler(runner.config.vocab_size)
    for logits_CV in logits_of(runner, token_ids[:-1]) if len(token_ids) > 1 else ():
        check_logits(logits_CV)
        ids = token_ids[len(scored) : len(scored) + len(logits_CV)]
        (ranked,) = scored_tokens([logits_CV], ids)
        logprobs = [sampler.logprobs(*row, 0).logprob for row in zip(logits_CV, ids, strict=True)]
        scored += map(TokenScore, ids, logprobs, ranked.ranks_C.tolist())
    return Score(tuple(scored))


def score_text(runner: Runner, tokenizer: Tokenizer, text: str) -> Score:
    """Score a text and include each token's text; BOS is prepended if the tokenizer adds it.

    Raises:
        TokenizerError: If the text cannot be encoded.
        InputError: If it has no tokens.
        ContextLengthError: If it has more tokens than the context length.
    """
    scored = score(runner, tokenizer.encode(text))
    return Score(tuple(replace(token, text=tokenizer.token_text(token.token_id)) for token in scored.tokens))


class ScoredTokens(NamedTuple):
    """A model's predictions of the C tokens that followed.

    Attributes:
        ids_C: int64; the tokens.
        logprobs_C: float32; log P(token | context), natural.
        ranks_C: int64; rank among all tokens, 1 for the most likely.
        greedy_C: bool; True if greedy decoding would have chosen the token.
    """

    ids_C: NDArray[np.int64]
    logprobs_C: Floats
    ranks_C: NDArray[np.int64]
    greedy_C: NDArray[np.bool_]


def scored_tokens(logits: Iterable[Floats], next_ids: Sequence[int]) -> Iterator[ScoredTokens]:
    """Score the tokens that followed; `logits` are float32 (C, V) at a time, as `logits_of` yields them."""
    start = 0
    for logits_CV in logits:
        ids_C = np.array(next_ids[start : start + len(logits_CV)], np.int64)
        start += len(logits_CV)
        chosen_C1 = logits_CV[np.arange(len(ids_C)), ids_C, None]
        ranks_C = (logits_CV > chosen_C1).sum(-1) + 1
        max_C1 = logits_CV.max(-1, keepdims=True)
        logprobs_C = (chosen_C1 - max_C1)[:, 0] - np.log(np.exp(logits_CV - max_C1).sum(-1))
        yield ScoredTokens(ids_C, logprobs_C, ranks_C, logits_CV.argmax(-1) == ids_C)
