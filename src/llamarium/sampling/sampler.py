"""How the next token is chosen, for any number of requests at once.

    sampler = Sampler(vocab_size)
    rows = [SamplingRow(params, prompt_ids, vocab_size), ...]  # the state of each answer
    chosen = sampler.sample(rows, logits_BV)                   # one step: [Chosen(token_id, logprob, top), ...]

A row keeps its own state, so each step may have other rows.

`sampling/steps.py` defines the steps from logits to a token. C makes the choice (`native/choose.h`), and NumPy where
the kernels are missing; all tests of the sampler run through both. Logits of another device are copied to the host
first: half a megabyte for a row of the largest vocabulary.
"""

import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from llamarium.kernels import native
from llamarium.runtime.runner import Logits
from llamarium.sampling.constraint import NoToken
from llamarium.sampling.processor import Floats, processed_logits
from llamarium.sampling.row import Chosen, SamplingRow
from llamarium.sampling.steps import bias, choose, penalized

_BLOCK = 64  # logits per block; its maximum is found first


class Sampler:
    """Chooses tokens for any rows; what each gets depends on that row alone."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def sample(self, rows: Sequence[SamplingRow], logits_BV: Logits) -> list[Chosen]:
        """Choose one token for each row, and append it to the row; MemoryBudgetError without memory for candidates.

        Args:
            rows: B rows over this sampler's vocabulary.
            logits_BV: The model's logits; the same afterwards.
        """
        assert logits_BV.shape == (len(rows), self.vocab_size)
        processed = processed_logits(rows, logits_BV) if any(row.history is not None for row in rows) else {}
        values_BV = _as_numpy(logits_BV)
        ids = _choose(rows, values_BV, processed)
        return [self._note(row, values_BV[i], ids[i]) for i, row in enumerate(rows)]

    def logprobs(self, logits_V: Logits, token_id: int, num_top: int) -> Chosen:
        """Return log P of a token and of the `num_top` most probable ones, by its place's logits, as `sample` does.

        A `NoToken` where the logits have no finite maximum.
        """
        raw_V = _as_numpy(logits_V)
        largest = raw_V.max()
        if not math.isfinite(largest):
            return Chosen(NoToken.NOT_FINITE)
        shifted_V = raw_V - largest
        log_sum = math.log(np.exp(shifted_V).sum(dtype=np.float64))
        top_ids = _largest(raw_V, num_top)
        top = zip(top_ids.tolist(), (shifted_V[top_ids].astype(np.float64) - log_sum).tolist(), strict=True)
        return Chosen(token_id, float(shifted_V[token_id]) - log_sum, tuple(top))

    def _note(self, row: SamplingRow, logits_V: Floats, token_id: int) -> Chosen:
        if row.failure is not None:
            return Chosen(NoToken.PROCESSOR_FAILED)
        if token_id < 0:
            return Chosen(_why_none(row, logits_V))
        row.add(token_id)
        if row.params.logprobs is None:
            return Chosen(token_id)
        reported = self.logprobs(logits_V, token_id, row.params.logprobs)
        # Logits that are not finite may have a token, if a processor put others in their place; it has no log P.
        return reported if reported.token_id == token_id else Chosen(token_id)


def _choose(rows: Sequence[SamplingRow], logits_BV: Floats, processed: Mapping[int, Floats]) -> list[int]:
    """Return an id for each row, or -1; `processed` takes the place of the logits of some rows."""
    if native.library() is None:
        return [choose(row, processed.get(i, logits_BV[i])) for i, row in enumerate(rows)]

    for row in rows:
        row.choice.mask = None if row.constraint is None else row.constraint.mask().ctypes.data
    choices = [row.choice for row in rows]
    if not any(row.is_adjusted for row in rows):
        return native.choose(logits_BV, choices)
    with _adjusted(rows, logits_BV, processed):
        return native.choose(logits_BV, choices)


def _why_none(row: SamplingRow, logits_V: Floats) -> NoToken:
    if row.constraint is not None and not row.constraint.mask().any():
        return row.constraint.failure
    if row.history is not None and math.isfinite(float(logits_V.max())):
        return NoToken.PROCESSOR_EXCLUDES
    return NoToken.NOT_FINITE


def _as_numpy(logits: Logits) -> Floats:
    """The same memory where it is float32, in order and on the host, else a copy."""
    if isinstance(logits, np.ndarray):
        return np.ascontiguousarray(logits, np.float32)
    return logits.detach().float().contiguous().cpu().numpy()


@contextmanager
def _adjusted(rows: Sequence[SamplingRow], logits_BV: Floats, processed: Mapping[int, Floats]) -> Generator[None]:
    """Steps 0 to 3 in the body: the few logits that they concern are changed where they lie, and put back."""
    kept: list[tuple[int, NDArray[np.int64] | slice, Floats]] = []
    try:
        for i, processed_V in processed.items():
            kept.append((i, slice(None), logits_BV[i].copy()))
            logits_BV[i] = processed_V
        for i, row in enumerate(rows):
            if row.params.logit_bias:
                ids, values = bias(row.params.logit_bias)
                kept.append((i, ids, logits_BV[i, ids]))
                logits_BV[i, ids] += values
            if row.penalties is not None:
                ids = row.penalties.ids
                kept.append((i, ids, logits_BV[i, ids]))
                logits_BV[i, ids] = penalized(logits_BV[i, ids], row.params, row.penalties.counts)
            if row.excluded:
                ids = np.array(row.excluded)
                kept.append((i, ids, logits_BV[i, ids]))
                logits_BV[i, ids] = -np.inf
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
