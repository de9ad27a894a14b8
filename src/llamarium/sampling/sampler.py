"""The sampler: samples the next token of any number of answers at once. Torch-free.

    sampler = Sampler(vocab_size)
    rows = [SamplingRow(params, prompt_ids, vocab_size), ...]  # the state of each answer
    chosen = sampler.sample(rows, logits_BV)                   # one step: [Chosen(token_id, logprob, top), ...]

Each row carries its own state, so the rows may differ from step to step.

`sampling/steps.py` defines the steps from logits to a token. The C kernels implement them (`native/choose.h`), and
NumPy where the kernels are missing; the tests run both. Logits on another device are copied to the host first: half a
megabyte per row for the largest vocabulary.
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

_BLOCK = 64  # logits per block in `_largest`


class Sampler:
    """Samples tokens; each row's result depends only on that row."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def sample(self, rows: Sequence[SamplingRow], logits_BV: Logits) -> list[Chosen]:
        """Sample one token for each row and append it to the row.

        Args:
            rows: B rows.
            logits_BV: The model's logits; unchanged afterwards.

        Raises:
            MemoryBudgetError: If there is not enough memory for candidates.
        """
        assert logits_BV.shape == (len(rows), self.vocab_size)
        processed = processed_logits(rows, logits_BV) if any(row.history is not None for row in rows) else {}
        values_BV = _as_numpy(logits_BV)
        ids = _choose(rows, values_BV, processed)
        return [self._note(row, values_BV[i], ids[i]) for i, row in enumerate(rows)]

    def logprobs(self, logits_V: Logits, token_id: int, num_top: int) -> Chosen:
        """Return the log-probabilities of a token and of the `num_top` most likely ones, as `sample` reports them.

        The result has a `NoToken` if the logits have no finite maximum.
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
        # A processor may have replaced logits that are not finite; then the token has no log-probability.
        return reported if reported.token_id == token_id else Chosen(token_id)


def _choose(rows: Sequence[SamplingRow], logits_BV: Floats, processed: Mapping[int, Floats]) -> list[int]:
    """Return an id for each row, or -1; `processed` replaces the logits of some rows."""
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
    """Return logits as a contiguous float32 array on the host, copied only if necessary."""
    if isinstance(logits, np.ndarray):
        return np.ascontiguousarray(logits, np.float32)
    return logits.detach().float().contiguous().cpu().numpy()


@contextmanager
def _adjusted(rows: Sequence[SamplingRow], logits_BV: Floats, processed: Mapping[int, Floats]) -> Generator[None]:
    """Apply steps 0 to 3 (`sampling/steps.py`) to the logits in place, and restore them afterwards.

    They change few logits, so this is much cheaper than copying a row of the whole vocabulary.
    """
    originals: list[tuple[int, NDArray[np.int64] | slice, Floats]] = []
    try:
        for i, processed_V in processed.items():
            originals.append((i, slice(None), logits_BV[i].copy()))
            logits_BV[i] = processed_V
        for i, row in enumerate(rows):
            if row.params.logit_bias:
                ids, values = bias(row.params.logit_bias)
                originals.append((i, ids, logits_BV[i, ids]))
                logits_BV[i, ids] += values
            if row.penalties is not None:
                ids = row.penalties.ids
                originals.append((i, ids, logits_BV[i, ids]))
                logits_BV[i, ids] = penalized(logits_BV[i, ids], row.params, row.penalties.counts)
            if row.excluded:
                ids = np.array(row.excluded)
                originals.append((i, ids, logits_BV[i, ids]))
                logits_BV[i, ids] = -np.inf
        yield
    finally:
        for i, ids, values in reversed(originals):
            logits_BV[i, ids] = values


def _largest(values_V: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Return the ids of the `count` largest values, largest first; among equals, lower ids first."""
    if count == 0:
        return np.empty(0, np.int64)

    # At least k values reach the k-th largest of the block maxima. For a vocabulary of 128,256, partitioning the maxima
    # is 20 times as fast as partitioning all values.
    maxima = np.maximum.reduceat(values_V, np.arange(0, len(values_V), _BLOCK))
    maxima = maxima if count <= len(maxima) else values_V
    ids = np.flatnonzero(values_V >= np.partition(maxima, -count)[-count])
    return ids[np.argsort(-values_V[ids], kind="stable")][:count]
