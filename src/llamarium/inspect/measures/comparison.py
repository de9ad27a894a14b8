"""Two models' passes over one text, side by side: streams and predictions.

The text is the same, the model is not: its weights are packed, it has an adapter, training has gone on. After each
layer the two streams are compared, token by token (`measures/streams.py`), and at the end the predictions of the next
token: the divergence of the distributions (`measures/divergence.py`), the most probable tokens of both, and the
surprise of each at the token that comes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamarium.errors import InputError
from llamarium.inspect import forward
from llamarium.inspect.measures.divergence import compare
from llamarium.inspect.measures.streams import StreamError, stream_errors
from llamarium.inspect.numbers import JsonView, split
from llamarium.inspect.tokens import Candidate, check_count, name_candidates, top_candidates
from llamarium.inspect.trace import Trace
from llamarium.tokenizer.base import Tokenizer

NAMES = ("resid", "logits")
"""What both traces have to hold, of all tokens."""


@dataclass(frozen=True, slots=True)
class ComparedToken(JsonView):
    """Two models' predictions at one token of a text.

    Attributes:
        kl: KL(P_against || P) of the token after it, nats; 0 where both distributions are equal.
        surprise: -log P of the token itself, given those before it, nats; None for the first.
        candidates: The most probable tokens after it, the best first.
    """

    computed = ("same_top",)

    position: int
    token_id: int
    kl: float
    surprise: float | None
    surprise_against: float | None
    candidates: tuple[Candidate, ...]
    candidates_against: tuple[Candidate, ...]

    @property
    def same_top(self) -> bool:
        """Whether both have the same most probable token."""
        return self.candidates[0].token_id == self.candidates_against[0].token_id


@dataclass(frozen=True, slots=True)
class Comparison(JsonView):
    """Two passes over one text: distances of the streams after each layer, and the predictions at each token."""

    computed = "kl", "same_top"

    layers: tuple[StreamError, ...]
    tokens: tuple[ComparedToken, ...]

    @property
    def kl(self) -> float:
        """The mean of the tokens' divergences, nats."""
        return sum(token.kl for token in self.tokens) / len(self.tokens)

    @property
    def same_top(self) -> float:
        """The share of tokens after which both have the same most probable one."""
        return sum(token.same_top for token in self.tokens) / len(self.tokens)


def compare_passes(trace: Trace, against: Trace, *, k: int = 5, tokenizer: Tokenizer | None = None) -> Comparison:
    """Compare two models' passes over one text; see `Inspector.compare`.

    Both traces hold "resid" and "logits" of all tokens; `tokenizer` gives the candidates their texts.
    InputError if the two are not of the same tokens, layers and vocabulary, or for a `k` outside the vocabulary.
    """
    layers = tuple(stream_errors(trace, against))
    all_positions = tuple(range(len(trace.token_ids)))
    if any(("logits", None) not in traced.arrays or traced.positions != all_positions for traced in (trace, against)):
        raise InputError('the traces do not hold the logits of all tokens; trace both with names=["resid", "logits"]')
    sizes = [traced.arrays["logits", None].shape[1] for traced in (trace, against)]
    if sizes[0] != sizes[1]:
        raise InputError(f"the vocabularies have {sizes[0]:,} and {sizes[1]:,} tokens; expected the same")
    check_count(k, "k", sizes[0])
    return Comparison(layers, tuple(_tokens(trace, against, k, tokenizer)))


def _tokens(trace: Trace, against: Trace, k: int, tokenizer: Tokenizer | None) -> Iterator[ComparedToken]:
    """Yield both models' predictions at each token, a few rows of logits in float64 at a time."""
    ids = trace.token_ids
    logits = trace.arrays["logits", None], against.arrays["logits", None]
    rows = forward.num_rows(logits[0].shape[1], itemsize=8)
    before: list[tuple[float | None, float | None]] = [(None, None)]
    start = 0
    for pair in zip(*(split(logits_TV, rows) for logits_TV in logits), strict=True):
        ((compared, *logprobs),) = compare(*([part.astype(np.float64)] for part in pair))
        best, best_against = ([name_candidates(row, tokenizer) for row in top_candidates(part, k)] for part in pair)
        following = ids[start + 1 : start + 1 + rows]
        before += zip(*(_surprises(logprobs_CV, following) for logprobs_CV in logprobs), strict=True)
        for i, kl in enumerate(compared.kl_C.tolist()):
            at = start + i
            yield ComparedToken(at, ids[at], kl, *before[at], best[i], best_against[i])
        start += len(pair[0])


def _surprises(logprobs_CV: NDArray[np.floating[Any]], following: Sequence[int]) -> list[float]:
    return (-logprobs_CV[np.arange(len(following)), list(following)]).tolist()
