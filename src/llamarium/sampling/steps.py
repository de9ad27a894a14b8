"""The definition of sampling, and its steps in NumPy for one row.

The model gives one logit per token of the vocabulary. From there to a token, in this order:

0. `logits_processor`, a function of the caller's, returns other logits in their place (`sampling/processor.py`).
1. `logit_bias` is added.
2. `repetition_penalty` divides the positive and multiplies the negative logits of tokens that the prompt or the answer
   holds (CTRL, https://arxiv.org/abs/1909.05858, section 4.1).
3. `presence_penalty` and `frequency_penalty` are subtracted for tokens that the answer holds (OpenAI's definition), and
   tokens that the answer's grammar does not allow (`sampling/constraint.py`) are left out, as are those that end it
   before `min_tokens`.
4. At temperature 0 the largest logit wins, the lowest id among equals, and that is all.
5. `temperature` divides the logits.
6. `top_k` keeps the k largest.
7. `top_p` keeps the fewest largest whose probabilities, among those that `top_k` left, reach p.
8. `min_p` keeps those at least min_p times as probable as the most probable.
9. Each that is left gets its noise g added, and the largest sum wins: a draw in proportion to the probabilities.

This is the order of transformers' `_get_logits_processor` (bias, repetition, temperature, top-k, top-p, min-p), with
OpenAI's two penalties beside the third; vLLM's differs in that min-p comes before top-k. Each filter is a threshold on
the logits, so tokens that are exactly equal stay or go together and no order among them matters.

Reported log-probabilities are the model's own: log-softmax of the logits before any of these steps, as vLLM reports.

The noise is g = -log(-log(u)) with u uniform in (0, 1): the largest of logit + g is token i with probability
softmax(logits)_i (Gumbel-max: Gumbel 1954; Maddison, Tarlow and Minka 2014, https://arxiv.org/abs/1411.0030). Each
token's u is a pure function of the request's seed, the number of tokens that the request has so far, and the token's
id, in double precision:

    hash = splitmix64(splitmix64(splitmix64(seed, 0), tokens so far), id)
    v    = ((hash >> 12) + 0.5) / 2**52,  u = 1 - v

where `splitmix64(state, n)` is number n of the generator's stream from that state (Steele, Lea and Flood 2014). So a
request gives the same tokens alone, in any batch, on any device with the same logits, and when it is taken up again.
Logits that are rounded otherwise give another token only where two sums are equal within that rounding; the inverse of
a cumulated distribution would move all of its boundaries (docs/decisions/0016-draws-that-rounding-does-not-shift.md).

The steps here are for inspection, and `choose` is the choice where the C kernels are missing. C makes it elsewhere
(`native/choose.h`), and tests hold both to the same tokens.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llamarium.sampling.params import SamplingParams
from llamarium.sampling.processor import Floats, processed_logits
from llamarium.sampling.row import SamplingRow

GOLDEN, MIX1, MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Of splitmix64."""


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """A row's logits after a step.

    Attributes:
        name: The step; "logits" are the model's own, before any.
        is_on: Whether the row's parameters enable it; otherwise the logits are unchanged.
        logits_V: float32; -inf for excluded tokens. From "temperature" on less the largest, and divided by it.
    """

    name: str
    is_on: bool
    logits_V: Floats


def stages(row: SamplingRow, logits_V: Floats) -> Iterator[Stage]:
    """Yield a row's logits after each step, in order; at temperature 0 the steps up to the mask."""
    yield Stage("logits", True, logits_V)
    if row.history is not None:
        logits_V = processed_logits([row], logits_V[None]).get(0, logits_V)
        yield Stage("logits_processor", True, logits_V.copy())
    yield from _stages_from_bias(row, logits_V)


def choose(row: SamplingRow, logits_V: Floats) -> int:
    """Return the token that a row gets from logits after step 0, or -1 where none of them is finite after step 3."""
    adjusted_V = left_V = logits_V
    for stage in _stages_from_bias(row, logits_V):
        left_V = stage.logits_V
        if stage.name == "grammar":
            adjusted_V = left_V
            if not math.isfinite(adjusted_V.max()):
                return -1
    if row.params.temperature == 0:
        return int(adjusted_V.argmax())

    # In float64, and the maximum first, so that a small temperature overflows towards -inf only.
    scores_V = (adjusted_V.astype(np.float64) - adjusted_V.max()) / np.float32(row.params.temperature)
    scores_V += noise(row, len(scores_V))
    return int(np.where(left_V > -np.inf, scores_V, -np.inf).argmax())


def _stages_from_bias(row: SamplingRow, logits_V: Floats) -> Iterator[Stage]:
    """Yield what steps 1 to 8 leave."""
    params, x_V = row.params, logits_V.copy()
    if params.logit_bias:
        ids, values = bias(params.logit_bias)
        x_V[ids] += values
    yield Stage("logit_bias", bool(params.logit_bias), x_V.copy())
    if row.penalties is not None:
        ids = row.penalties.ids
        x_V[ids] = penalized(x_V[ids], params, row.penalties.counts)
    yield Stage("penalties", row.penalties is not None, x_V.copy())
    if row.constraint is not None:
        bits_V = np.unpackbits(row.constraint.mask().view(np.uint8), bitorder="little")[: len(x_V)]
        x_V[bits_V == 0] = -np.inf
    x_V[row.excluded] = -np.inf
    yield Stage("grammar", row.constraint is not None or bool(row.excluded), x_V.copy())
    if params.temperature == 0:
        return
    x_V = (x_V - x_V.max()) / np.float32(params.temperature)
    yield Stage("temperature", params.temperature != 1, x_V.copy())
    has_top_k = 0 < params.top_k < len(x_V)
    if has_top_k:
        x_V[x_V < np.partition(x_V, -params.top_k)[-params.top_k]] = -np.inf
    yield Stage("top_k", has_top_k, x_V.copy())
    probs_V = np.exp(x_V)  # the largest is 0
    probs_V /= probs_V.sum()
    if params.top_p < 1:
        x_V[probs_V < _nucleus_floor(probs_V, params.top_p)] = -np.inf
    yield Stage("top_p", params.top_p < 1, x_V.copy())
    if params.min_p > 0:
        x_V[probs_V < np.float32(params.min_p) * probs_V.max()] = -np.inf
    yield Stage("min_p", params.min_p > 0, x_V)


def _nucleus_floor(probs_V: Floats, top_p: float) -> np.float32:
    """Return the least probability among the fewest largest that reach p."""
    largest_V = np.sort(probs_V)[::-1]
    num_below = int((largest_V.cumsum(dtype=np.float64) < top_p).sum())
    return largest_V[min(num_below, len(largest_V) - 1)]


def noise(row: SamplingRow, vocab_size: int) -> NDArray[np.float64]:
    """Return what the draw adds to each token's logit, (V,)."""
    stream = splitmix64(splitmix64(row.seed, 0), row.num_tokens)
    z_V = np.uint64(stream) + np.arange(1, vocab_size + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    z_V = (z_V ^ (z_V >> np.uint64(30))) * np.uint64(MIX1)
    z_V = (z_V ^ (z_V >> np.uint64(27))) * np.uint64(MIX2)
    z_V ^= z_V >> np.uint64(31)
    v_V = ((z_V >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return -np.log(-np.log1p(-v_V))


def splitmix64(state: int, n: int) -> int:
    """Return number n of the stream that begins at `state`, 64 bits.

    Source: Steele, Lea and Flood 2014, Fast Splittable Pseudorandom Number Generators (java.util.SplittableRandom).
    """
    mask = 2**64 - 1
    z = (state + (n + 1) * GOLDEN) & mask
    z = (z ^ (z >> 30)) * MIX1 & mask
    z = (z ^ (z >> 27)) * MIX2 & mask
    return z ^ (z >> 31)


def bias(given: Mapping[int, float]) -> tuple[NDArray[np.int64], Floats]:
    """Return the ids that step 1 adds to, and what it adds."""
    return np.fromiter(given, np.int64, len(given)), np.fromiter(given.values(), np.float32, len(given))


def penalized(logits_U: Floats, params: SamplingParams, counts_U: Floats) -> Floats:
    """Return what steps 2 and 3 make of the tokens that a row holds."""
    penalty = np.float32(params.repetition_penalty)
    with np.errstate(over="ignore"):  # infinite then, which is reported as no finite maximum
        out_U = np.where(logits_U > 0, logits_U / penalty, logits_U * penalty)
    out_U -= np.float32(params.frequency_penalty) * counts_U
    out_U -= np.float32(params.presence_penalty) * (counts_U > 0)
    return out_U
