"""The definition of sampling, and its steps in NumPy for one row.

The model gives one logit per token of the vocabulary. From there to a token, in this order:

0. `logits_processor`, a caller's function, may replace the logits (`sampling/processor.py`).
1. `logit_bias` is added.
2. `repetition_penalty` divides the positive and multiplies the negative logits of tokens in the prompt or the answer
   (CTRL, https://arxiv.org/abs/1909.05858, section 4.1).
3. `presence_penalty` and `frequency_penalty` are subtracted from the logits of tokens in the answer (OpenAI's
   definition). Tokens that the grammar forbids (`sampling/constraint.py`) are excluded, and so are stop tokens until
   the answer has `min_tokens` tokens.
4. At temperature 0, the token with the largest logit is the result; the lowest id among equals.
5. `temperature` divides the logits.
6. `top_k` keeps the k largest.
7. `top_p` keeps the fewest of the largest whose probabilities, normalized after `top_k`, sum to at least p.
8. `min_p` keeps tokens of at least min_p times the probability of the most likely one.
9. Noise g is added to each remaining logit, and the largest sum wins: a sample in proportion to the probabilities.

This is the order of transformers' `_get_logits_processor` (bias, repetition, temperature, top-k, top-p, min-p), with
OpenAI's two penalties after the repetition penalty; vLLM applies min-p before top-k. Each filter is a threshold on the
logits, so tokens with equal logits are kept or removed together, and their order does not matter.

Reported log-probabilities are the model's: log-softmax of the logits before any of these steps, as in vLLM.

The noise is g = -log(-log(u)) with u uniform in (0, 1): the largest of logit + g is token i with probability
softmax(logits)_i (Gumbel-max: Gumbel 1954; Maddison, Tarlow and Minka 2014, https://arxiv.org/abs/1411.0030). Each
token's u is a pure function of the request's seed, the number of tokens of the answer so far, and the token id, in
double precision:

    hash = splitmix64(splitmix64(splitmix64(seed, 0), tokens so far), id)
    v    = ((hash >> 12) + 0.5) / 2**52,  u = 1 - v

where `splitmix64(state, n)` is the n-th number of the generator's stream from that state (Steele, Lea and Flood 2014).
So a request gives the same tokens alone, in any batch, after preemption, and on any device with the same logits. Logits
with different rounding change the token only where two sums are equal within that rounding, whereas inverse transform
sampling would shift all boundaries (docs/decisions/0016-draws-that-rounding-does-not-shift.md).

`stages` is for inspection. `choose` is used where the C kernels are missing; otherwise `native/choose.h` is, and tests
compare their tokens.
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
"""Constants of splitmix64."""


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """A row's logits after a step.

    Attributes:
        name: The step; "logits" is the state before any step.
        is_on: Whether the row's parameters enable it; if not, the logits are unchanged.
        logits_V: float32, -inf for excluded tokens. From "temperature" on, the maximum is subtracted, and the result is
            divided by the temperature.
    """

    name: str
    is_on: bool
    logits_V: Floats


def stages(row: SamplingRow, logits_V: Floats) -> Iterator[Stage]:
    """Yield a row's logits after each step, in order; at temperature 0 only up to the grammar."""
    yield Stage("logits", True, logits_V)
    if row.history is not None:
        logits_V = processed_logits([row], logits_V[None]).get(0, logits_V)
        yield Stage("logits_processor", True, logits_V.copy())
    yield from _stages_from_bias(row, logits_V)


def choose(row: SamplingRow, logits_V: Floats) -> int:
    """Return the token that a row samples from logits after step 0, or -1 if none is finite after step 3."""
    adjusted_V = left_V = logits_V
    for stage in _stages_from_bias(row, logits_V):
        left_V = stage.logits_V
        if stage.name == "grammar":
            adjusted_V = left_V
            if not math.isfinite(adjusted_V.max()):
                return -1
    if row.params.temperature == 0:
        return int(adjusted_V.argmax())

    # In float64, and relative to the maximum, so that a small temperature can overflow only to -inf.
    scores_V = (adjusted_V.astype(np.float64) - adjusted_V.max()) / np.float32(row.params.temperature)
    scores_V += noise(row, len(scores_V))
    return int(np.where(left_V > -np.inf, scores_V, -np.inf).argmax())


def _stages_from_bias(row: SamplingRow, logits_V: Floats) -> Iterator[Stage]:
    """Yield the logits after each of the steps 1 to 8."""
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
    """Return the smallest probability that top-p keeps."""
    largest_V = np.sort(probs_V)[::-1]
    num_below = int((largest_V.cumsum(dtype=np.float64) < top_p).sum())
    return largest_V[min(num_below, len(largest_V) - 1)]


def noise(row: SamplingRow, vocab_size: int) -> NDArray[np.float64]:
    """Return the Gumbel noise of a row's next token, (V,), float64."""
    stream = splitmix64(splitmix64(row.seed, 0), row.num_tokens)
    z_V = np.uint64(stream) + np.arange(1, vocab_size + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    z_V = (z_V ^ (z_V >> np.uint64(30))) * np.uint64(MIX1)
    z_V = (z_V ^ (z_V >> np.uint64(27))) * np.uint64(MIX2)
    z_V ^= z_V >> np.uint64(31)
    v_V = ((z_V >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return -np.log(-np.log1p(-v_V))


def splitmix64(state: int, n: int) -> int:
    """Return the n-th number, 64 bits, of the stream that starts at `state`.

    Source: Steele, Lea and Flood 2014, Fast Splittable Pseudorandom Number Generators (java.util.SplittableRandom).
    """
    mask = 2**64 - 1
    z = (state + (n + 1) * GOLDEN) & mask
    z = (z ^ (z >> 30)) * MIX1 & mask
    z = (z ^ (z >> 27)) * MIX2 & mask
    return z ^ (z >> 31)


def bias(logit_bias: Mapping[int, float]) -> tuple[NDArray[np.int64], Floats]:
    """Return the ids and values of step 1 as arrays."""
    return np.fromiter(logit_bias, np.int64, len(logit_bias)), np.fromiter(
        logit_bias.values(), np.float32, len(logit_bias)
    )


def penalized(logits_U: Floats, params: SamplingParams, counts_U: Floats) -> Floats:
    """Return the logits of a row's distinct tokens after steps 2 and 3."""
    penalty = np.float32(params.repetition_penalty)
    with np.errstate(over="ignore"):  # the sampler reports infinite logits
        out_U = np.where(logits_U > 0, logits_U / penalty, logits_U * penalty)
    out_U -= np.float32(params.frequency_penalty) * counts_U
    out_U -= np.float32(params.presence_penalty) * (counts_U > 0)
    return out_U
