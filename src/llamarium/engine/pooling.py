"""One vector for a text: its tokens' hidden states, gathered over the steps that run it. Never torch."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from llamarium.runtime.taps import Key

Pooling = Literal["mean", "last"]
"""Of all tokens' hidden states, or the last token's alone."""

Vector = NDArray[np.float32]
"""(D,), of length 1."""

HIDDEN: Key = ("final_norm", None)
"""What is gathered: the residual stream after the last layer, normalised for the head."""


class Pool:
    """Gathers the hidden states of one text; `kind` says which of them count."""

    def __init__(self, kind: Pooling) -> None:
        self.kind: Pooling = kind
        self._sum: NDArray[np.float64] | None = None
        self._num_rows = 0

    def take(self, rows_MD: NDArray[np.float32], start: int) -> None:
        """Take the hidden states of the next tokens; at position 0 a preempted text begins anew.

        A mean is summed up row after row, so that no bit depends on how the text was cut.
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
        """Return the vector, (D,), of length 1; None if it has no direction: of NaN, infinities or zeros."""
        assert self._sum is not None
        mean = self._sum / self._num_rows
        length = np.linalg.norm(mean)
        return (mean / length).astype(np.float32) if np.isfinite(length) and length > 0 else None
