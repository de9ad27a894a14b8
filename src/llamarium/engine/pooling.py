"""One vector for a text: its tokens' hidden states, gathered over the steps that run it. Never torch."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from llamarium.runtime.batch import Span
from llamarium.runtime.taps import Key, Taps

Pooling = Literal["mean", "last"]
"""Of all tokens' hidden states, or the last token's alone."""

Vector = NDArray[np.float32]
"""(D,), of length 1."""

HIDDEN: Key = ("final_norm", None)
"""What is gathered: the residual stream after the last layer, normalised for the head."""


class Pool:
    """Gathers the hidden states of one text.

    Args:
        kind: Which of them count.

    Attributes:
        kind: The same.
    """

    def __init__(self, kind: Pooling) -> None:
        self.kind: Pooling = kind
        self._sum: NDArray[np.float64] | None = None
        self._num_rows = 0

    def take(self, rows_MD: NDArray[np.float32], start: int) -> None:
        """Take the states of tokens that follow those that were taken before.

        A mean is summed up row after row, so that no bit depends on how the text was cut.

        Args:
            rows_MD: Their hidden states.
            start: The first one's position; at 0 a text that had to give its blocks back begins anew.
        """
        if self.kind == "last":
            self._sum, self._num_rows = rows_MD[-1].astype(np.float64), 1
            return
        rows = rows_MD.astype(np.float64)
        if start > 0 and self._sum is not None:
            rows = np.concatenate([self._sum[None], rows])
        else:
            self._num_rows = 0
        self._sum = rows.sum(0)
        self._num_rows += len(rows_MD)

    def vector(self) -> Vector | None:
        """Return what was gathered, (D,), of length 1; None where it has no direction: of NaN, infinities or zeros."""
        assert self._sum is not None
        mean = self._sum / self._num_rows
        length = np.linalg.norm(mean)
        return (mean / length).astype(np.float32) if np.isfinite(length) and length > 0 else None


def gather(pools: Sequence[Pool | None], spans: Sequence[Span], taps: Taps) -> None:
    """Hand a batch's hidden states to those who gather them.

    Args:
        pools: Of each sequence, where it has one.
        spans: What was run of each.
        taps: What the run has handed out.
    """
    hidden_MD, begin = _on_host(taps.kept[HIDDEN][0]), 0
    for pool, span in zip(pools, spans, strict=True):
        end = begin + len(span.token_ids)
        if pool is not None:
            pool.take(hidden_MD[begin:end], span.start)
        begin = end


def _on_host(rows_MD: Any) -> NDArray[np.float32]:
    """Return tapped states as float32 of numpy; from modules they come as tensors, on any device."""
    return rows_MD if isinstance(rows_MD, np.ndarray) else rows_MD.float().cpu().numpy()
