"""Hidden states, gathered over the steps that compute them: one vector for a text, or some as they are. Never torch."""

import copy
from collections.abc import Sequence
from typing import Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from llamarium.runtime.taps import Key, Taps

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


class Places(NamedTuple):
    """Where the residual stream is wanted: after these layers, at these positions of the text, answer included."""

    layers: Sequence[int]
    positions: Sequence[int]


class State(NamedTuple):
    """The residual stream after a layer, at a position of the text: (D,)."""

    layer: int
    position: int
    values: NDArray[np.float32]


class States:
    """Gathers the residual stream of one text at some places.

    Keys and values that are in the cache came without it, so its sequence takes none from `first_missing` on.
    """

    def __init__(self, places: Places) -> None:
        self._layers, self._missing = tuple(dict.fromkeys(places.layers)), sorted(set(places.positions))
        self._found: list[State] = []

    @property
    def first_missing(self) -> int | None:
        """The first position that is not there yet; None once all are."""
        return self._missing[0] if self._missing else None

    def keys(self, start: int, end: int) -> list[Key]:
        """Return what has to be tapped in a pass over the tokens from `start` to before `end`."""
        return [("resid", layer) for layer in self._layers if any(start <= place < end for place in self._missing)]

    def take(self, taps: Taps | None, row: int, start: int, end: int) -> None:
        """Take what a pass over those tokens gave, from `row` of the batch on."""
        come = [place for place in self._missing if start <= place < end]
        for place in come:
            assert taps is not None
            for layer in self._layers:
                self._found.append(State(layer, place, taps.kept["resid", layer][0][row + place - start].copy()))
        self._missing = [place for place in self._missing if place not in come]

    def drain(self) -> tuple[State, ...]:
        """Return what has come since the last call."""
        found, self._found = tuple(self._found), []
        return found

    def fork(self) -> Self:
        """Return the same for another answer to the text so far."""
        other = copy.copy(self)
        other._found = list(self._found)
        return other
