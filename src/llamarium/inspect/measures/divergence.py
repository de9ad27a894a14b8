"""The distance of one model's predictions from another's, token by token: the effect of quantizing, say.

Perplexity takes only the probability of the token that came. A quantized model may lose on one token what it gains on
the next, and seem unchanged. The Kullback-Leibler divergence compares the whole distributions at every token:

    KL(P || Q) = sum over tokens w of P(w) * (log P(w) - log Q(w))

with P the reference model and Q the other, in nats; 0 only where both are equal. Beside its mean stand its standard
error, the 99th percentile (rare large errors hide in a mean), and how often both would choose the same token.

Both models read the same windows (`inspect/measures/perplexity.py`); only a few rows of logits are in memory at a time.

Source: Kullback & Leibler 1951; the set of numbers is that of llama.cpp's `llama-perplexity --kl-divergence`.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamarium.inspect.forward import logits_of
from llamarium.inspect.measures.perplexity import Perplexity, Window, check_number, check_window, scored_ids, windows
from llamarium.inspect.numbers import Floats, log_softmax
from llamarium.runtime.runner import Runner
from llamarium.tokenizer.base import Tokenizer

PERCENTILE = 99


@dataclass(frozen=True, slots=True)
class Divergence:
    """The distance of a model from the reference.

    Attributes:
        model: The perplexity of the model.
        against: That of the reference, on the same windows.
        kl: Mean KL(P_against || P_model), nats per token.
        kl_error: Standard error of that mean, as if tokens were independent of each other.
        kl_percentile: The 99th percentile of the KL of a token.
        same_top: Share of tokens for which both have the same most probable one.
    """

    model: Perplexity
    against: Perplexity
    kl: float
    kl_error: float
    kl_percentile: float
    same_top: float

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values: the model's own perplexity, then the comparison."""
        return {
            **self.model.to_dict(),
            "against_perplexity": self.against.perplexity,
            "against_nats": self.against.nats,
            "kl": self.kl,
            "kl_error": self.kl_error,
            f"kl_percentile_{PERCENTILE}": self.kl_percentile,
            "same_top": self.same_top,
        }


class Compared(NamedTuple):
    """KL(P_against || P_model) of C tokens, nats, and whether both models have the same most probable one."""

    kl_C: Floats
    same_C: NDArray[np.bool_]


def divergence_of_text(
    runner: Runner,
    against: Runner,
    tokenizer: Tokenizer,
    text: str,
    *,
    context: int | None = None,
    stride: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Divergence:
    """Measure a model against a reference of the same vocabulary; see `Llama.divergence`.

    Raises:
        TokenizerError: If the text cannot be encoded.
        InputError: If it has no token to score, or `context` or `stride` is out of range for one of the models.
        LlamariumError: If a model's logits are NaN.
    """
    context, stride = check_window(runner.config, context, stride)
    check_window(against.config, context, stride)
    ids, bos = scored_ids(tokenizer, text)
    comparisons: list[Compared] = []
    nats, nats_against, num_windows = 0.0, 0.0, 0
    for window in windows(len(ids), context, stride, progress):
        for compared, logprobs_2C in _window(runner, against, ids, window):
            comparisons.append(compared)
            sums = logprobs_2C.sum(-1, dtype=np.float64).tolist()
            nats, nats_against = nats - sums[0], nats_against - sums[1]
        num_windows += 1
    check_number(nats, "the model")
    check_number(nats_against, "the model that it is measured against")
    rest = (len(ids) - 1, len(text.encode()), context, stride, num_windows, bos)
    return _sum_up(Perplexity(nats, *rest), Perplexity(nats_against, *rest), comparisons)


def compare(logits: Iterable[Floats], logits_against: Iterable[Floats]) -> Iterator[tuple[Compared, Floats, Floats]]:
    """Compare two models' logits, (C, V) of the same positions, a few positions at a time.

    Yields:
        The comparison, and log P of every token (C, V) by the model and by the reference.
    """
    for logits_CV, logits_against_CV in zip(logits, logits_against, strict=True):
        logprobs_CV, against_CV = log_softmax(logits_CV), log_softmax(logits_against_CV)
        same_C = logprobs_CV.argmax(-1) == against_CV.argmax(-1)
        yield Compared(kl_of_rows(against_CV, logprobs_CV), same_C), logprobs_CV, against_CV


def kl_of_rows(p_CV: Floats, q_CV: Floats) -> Floats:
    """Return KL(P || Q) of each row of log-probabilities, nats: (C,).

    A token that P never chooses adds nothing, whatever Q says of it.
    """
    probabilities_CV = np.exp(p_CV)
    with np.errstate(invalid="ignore"):  # 0 times what is not finite
        return np.where(probabilities_CV > 0, probabilities_CV * (p_CV - q_CV), 0).sum(-1)


def _window(runner: Runner, against: Runner, ids: Sequence[int], window: Window) -> Iterator[tuple[Compared, Floats]]:
    """Compare what a window scores; also yield log P of the tokens that came, (2, C)."""
    count, start = window.end - window.first, window.first
    parts = [logits_of(model, ids[window.begin : window.end - 1], count) for model in (runner, against)]
    for compared, *logprobs in compare(*parts):
        rows, next_C = np.arange(len(logprobs[0])), ids[start : start + len(logprobs[0])]
        start += len(next_C)
        yield compared, np.stack([table_CV[rows, next_C] for table_CV in logprobs])


def _sum_up(model: Perplexity, against: Perplexity, comparisons: Sequence[Compared]) -> Divergence:
    kl_M = np.concatenate([compared.kl_C for compared in comparisons]).astype(np.float64)
    same_M = np.concatenate([compared.same_C for compared in comparisons])
    error = float(kl_M.std(ddof=1)) / math.sqrt(len(kl_M)) if len(kl_M) > 1 else math.inf
    place = math.ceil(len(kl_M) * PERCENTILE / 100) - 1  # of the value that 99 % do not exceed
    percentile = float(np.partition(kl_M, place)[place])
    return Divergence(model, against, float(kl_M.mean()), error, percentile, float(same_M.mean()))
