"""How the next token is chosen, for any number of requests at once.

    sampler = Sampler(vocab_size, device)                      # where the logits will be
    rows = [SamplingRow(params, prompt_ids, vocab_size), ...]  # one a request: what it asks, what it holds so far
    chosen = sampler.sample(rows, logits_BV)                   # one step: [Chosen(token_id, logprob, top), ...]

What a row has said is its own knowledge, so each step may have other rows: they join and leave as they are passed.

The model gives one logit per token of the vocabulary. From there to a token, in this order:

1. `logit_bias` is added.
2. `repetition_penalty` divides the positive and multiplies the negative logits of tokens that the prompt or the answer
   holds (CTRL, https://arxiv.org/abs/1909.05858, section 4.1).
3. `presence_penalty` and `frequency_penalty` are subtracted for tokens that the answer holds (OpenAI's definition), and
   tokens that the answer's form does not allow (`sampling/constraint.py`) are left out.
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

There are two implementations of this one definition, which every test of the sampler runs through: on a CPU, numpy for
bias and penalties, and C for the others (`native/choose.h`); and PyTorch (`sampling/torch_sampler.py`) on other devices
and where the kernels are missing, which is imported for them only.
"""

import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from llamarium.kernels import native
from llamarium.runtime.runner import Logits
from llamarium.sampling.constraint import Constraint, NoToken
from llamarium.sampling.row import Chosen, SamplingRow
from llamarium.sampling.steps import bias, penalized

if TYPE_CHECKING:
    import torch

_BLOCK = 64  # logits of which the largest is found first


class _Way(Protocol):
    """An implementation of the steps."""

    def choose(self, rows: Sequence[SamplingRow], logits: Logits) -> list[int]: ...

    def logprobs(self, logits_V: Logits, token_id: int, num_top: int) -> Chosen: ...


class Sampler:
    """Chooses tokens for any rows; what each gets depends on that row alone."""

    def __init__(self, vocab_size: int, device: "torch.device | str" = "cpu") -> None:
        """Choose the implementation.

        Args:
            vocab_size: V.
            device: Where the logits will be.
        """
        self.vocab_size = vocab_size
        self._way: _Way
        if str(device) == "cpu" and native.library() is not None:
            self._way = _InC()
        else:
            from llamarium.sampling.torch_sampler import InTorch

            self._way = InTorch(device)

    def sample(self, rows: Sequence[SamplingRow], logits_BV: Logits) -> list[Chosen]:
        """Choose one token for each row, and note it in the row.

        Args:
            rows: B rows over this sampler's vocabulary.
            logits_BV: The model's logits; the same afterwards.

        Raises:
            MemoryBudgetError: If there is no memory for the candidates.
        """
        assert logits_BV.shape == (len(rows), self.vocab_size)
        ids = self._way.choose(rows, logits_BV)
        return [self._note(row, logits_BV, i, ids[i]) for i, row in enumerate(rows)]

    def logprobs(self, logits_V: Logits, token_id: int, num_top: int) -> Chosen:
        """Report on a token that came, under the model's logits for its place.

        Args:
            logits_V: Of that place.
            token_id: The token.
            num_top: How many of the most probable tokens to report.

        Returns:
            What `sample` reports of tokens that it chooses; a `NoToken` where the logits have no finite maximum.
        """
        if not math.isfinite(float(logits_V.max())):
            return Chosen(NoToken.NOT_FINITE)
        return self._way.logprobs(logits_V, token_id, num_top)

    def _note(self, row: SamplingRow, logits_BV: Logits, i: int, token_id: int) -> Chosen:
        if token_id < 0:
            return Chosen(NoToken.NOT_FINITE if row.constraint is None else _why_none(row.constraint))
        row.add(token_id)
        if row.params.logprobs is None:
            return Chosen(token_id)
        return self._way.logprobs(logits_BV[i], token_id, row.params.logprobs)


class _InC:
    """The steps in numpy and C."""

    def choose(self, rows: Sequence[SamplingRow], logits: Logits) -> list[int]:
        """Return an id for each row, or -1."""
        logits_BV = _as_numpy(logits)
        for row in rows:
            row.choice.mask = None if row.constraint is None else row.constraint.mask().ctypes.data
        with _adjusted(rows, logits_BV):
            return native.choose(logits_BV, [row.choice for row in rows])

    def logprobs(self, logits_V: Logits, token_id: int, num_top: int) -> Chosen:
        """Report on a token that has been chosen."""
        raw_V = _as_numpy(logits_V)
        shifted_V = raw_V - raw_V.max()
        log_sum = math.log(np.exp(shifted_V).sum(dtype=np.float64))
        top_ids = _largest(raw_V, num_top)
        top = zip(top_ids.tolist(), (shifted_V[top_ids].astype(np.float64) - log_sum).tolist(), strict=True)
        return Chosen(token_id, float(shifted_V[token_id]) - log_sum, tuple(top))


def _why_none(constraint: Constraint) -> NoToken:
    return NoToken.NOT_FINITE if constraint.mask().any() else constraint.failure


def _as_numpy(logits: Logits) -> NDArray[np.float32]:
    """The same memory where it is float32 and in order, else a copy."""
    if isinstance(logits, np.ndarray):
        return np.ascontiguousarray(logits, np.float32)
    return logits.detach().float().contiguous().numpy()


@contextmanager
def _adjusted(rows: Sequence[SamplingRow], logits_BV: NDArray[np.float32]) -> Generator[None]:
    """Steps 1 to 3 in the body: the few logits that they concern are changed where they lie, and put back."""
    kept: list[tuple[int, NDArray[np.int64], NDArray[np.float32]]] = []
    try:
        for i, row in enumerate(rows):
            if row.params.logit_bias:
                ids, values = bias(row.params.logit_bias)
                kept.append((i, ids, logits_BV[i, ids]))
                logits_BV[i, ids] += values
            if row.penalties is not None:
                ids = row.penalties.ids
                kept.append((i, ids, logits_BV[i, ids]))
                logits_BV[i, ids] = penalized(logits_BV[i, ids], row.params, row.penalties.counts)
        yield
    finally:
        for i, ids, values in reversed(kept):
            logits_BV[i, ids] = values


def _largest(values_V: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """The ids of the `count` largest, from the largest on, the lowest ids among equals.

    No fewer than k reach the k-th largest of the blocks' maxima, and those are few: finding it is 20 times as fast as
    finding the k-th largest of a vocabulary of 128,256.
    """
    if count == 0:
        return np.empty(0, np.int64)
    maxima = np.maximum.reduceat(values_V, np.arange(0, len(values_V), _BLOCK))
    maxima = maxima if count <= len(maxima) else values_V
    ids = np.flatnonzero(values_V >= np.partition(maxima, -count)[-count])
    return ids[np.argsort(-values_V[ids], kind="stable")][:count]
