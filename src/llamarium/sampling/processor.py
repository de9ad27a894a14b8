"""Logits processors: a caller's function that changes the logits. Torch-free.

    def no_commas(token_ids, logits):
        logits[comma] = -np.inf
        return logits

    llama.generate("Once upon a time", logits_processor=no_commas)

It is the first step of sampling (`sampling/steps.py`): bias, penalties, grammar and all filters apply to its result.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamarium.errors import LogitsProcessorError, show_value
from llamarium.runtime.runner import Logits
from llamarium.sampling.row import SamplingRow

Floats = NDArray[np.float32]


def processed_logits(rows: Sequence[SamplingRow], logits_BV: Logits) -> dict[int, Floats]:
    """Call the rows' logits processors; return the results by row index, float32 (V,).

    If a processor fails, the row's `failure` is set. It is not called for logits without a finite maximum, which the
    sampler reports.
    """
    processed: dict[int, Floats] = {}
    for index, row in enumerate(rows):
        if row.history is None:
            continue
        own_V = _float32_copy(logits_BV[index])
        if np.isfinite(own_V.max()) and (result_V := _call(row, row.history, own_V)) is not None:
            processed[index] = result_V
    return processed


def _call(row: SamplingRow, history: Sequence[int], own_V: Floats) -> Floats | None:
    function = row.params.logits_processor
    assert function is not None, "only rows with a processor have a history"
    try:
        return _checked(function(np.array(history, np.int64), own_V), len(own_V))
    except LogitsProcessorError as error:
        row.failure = error
    except Exception as error:  # noqa: BLE001 - any error of a caller's function ends only its request
        row.failure = LogitsProcessorError(f"the logits processor raised {type(error).__name__}: {show_value(error)}")
        row.failure.__cause__ = error
    return None


def _checked(result: Any, vocab_size: int) -> Floats:
    """Return a processor's result as float32; LogitsProcessorError unless a token can be sampled from it."""
    expected = f"expected float32 logits of shape ({vocab_size},)"
    if result is None:
        raise LogitsProcessorError(f"the logits processor returned None; {expected}: end it with `return logits`")
    if not isinstance(result, np.ndarray):
        raise LogitsProcessorError(
            f"the logits processor returned {type(result).__name__}; {expected}, as a NumPy array"
        )
    if result.shape != (vocab_size,):
        raise LogitsProcessorError(f"the logits processor returned an array of shape {result.shape}; {expected}")
    if not np.issubdtype(result.dtype, np.floating):
        raise LogitsProcessorError(f"the logits processor returned an array of {result.dtype}; {expected}")
    with np.errstate(over="ignore"):
        result_V = np.ascontiguousarray(result, np.float32)
    largest = result_V.max()  # NaN if any is NaN
    if np.isnan(largest):
        raise LogitsProcessorError("the logits processor returned NaN; expected numbers, or -inf to exclude a token")
    if largest == np.inf:
        raise LogitsProcessorError(
            "the logits processor returned +inf, or more than float32 holds; expected finite numbers, or -inf to "
            "exclude a token: to force one, exclude all others"
        )
    if largest == -np.inf:
        raise LogitsProcessorError("the logits processor excluded every token; leave at least one that is not -inf")
    return result_V


def _float32_copy(logits_V: Logits) -> Floats:
    if isinstance(logits_V, np.ndarray):
        return np.array(logits_V, np.float32)
    return np.array(logits_V.detach().float().cpu().numpy())
