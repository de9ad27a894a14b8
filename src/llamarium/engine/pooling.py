"""Collect hidden states over the steps that compute them: pooled to one vector, or as they are. Torch-free."""

import copy
from collections.abc import Sequence
from typing import Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from llamarium.runtime.taps import Key, Taps

Pooling = Literal["mean", "last"]
"""The mean over all tokens, or the last token only."""

Vector = NDArray[np.float32]
"""A vector, (D,), of length 1."""

HIDDEN: Key = ("final_norm", None)
"""The tap of the hidden states that are pooled: the output of the final norm."""


class Pool:
    """Pools the hidden states of one text over several steps."""

    def __init__(self, kind: Pooling) -> None:
        self.kind: Pooling = kind
        self._sum: NDArray[np.float64] | None = None
        self._num_rows = 0

    def take(self, rows_MD: NDArray[np.float32], start: int) -> None:
        """Add the hidden states (M, D) of the tokens from position `start` on; 0 starts over after a preemption."""
        if self.kind == "last":
            self._sum, self._num_rows = rows_MD[-1].astype(np.float64), 1
            return
        # Rows are added one after another, so the bits of the sum do not depend on how the text was split into chunks.
        rows = rows_MD.astype(np.float64)
        if start > 0 and self._sum is not None:
            rows = np.concatenate([self._sum[None], rows])
        else:
            self._num_rows = 0
        self._sum = rows.sum(0)
        self._num_rows += len(rows_MD)

    def vector(self) -> Vector | None:
        """Return the pooled vector (D,) of length 1; None if it is zero or not finite."""
        assert self._sum is not None
        mean = self._sum / self._num_rows
        length = np.linalg.norm(mean)
        return (mean / length).astype(np.float32) if np.isfinite(length) and length > 0 else None


class Places(NamedTuple):
    """Layers and positions whose hidden states are returned; positions count from the start of the prompt."""

    layers: Sequence[int]
    positions: Sequence[int]


class State(NamedTuple):
    """The residual stream (D,) after a layer, at one position."""

    layer: int
    position: int
    values: NDArray[np.float32]


class States:
    """Collects the residual stream of one sequence at some places.

    Cached keys and values come without hidden states, so its sequence uses none from `first_missing` on.
    """

    def __init__(self, places: Places) -> None:
        self._layers, self._missing = tuple(dict.fromkeys(places.layers)), sorted(set(places.positions))
        self._found: list[State] = []

    @property
    def first_missing(self) -> int | None:
        """The first position that has not been computed yet; None once all are."""
        return self._missing[0] if self._missing else None

    def keys(self, start: int, end: int) -> list[Key]:
        """Return the taps needed in a pass over the positions from `start` to before `end`."""
        return [
            ("resid", layer) for layer in self._layers if any(start <= position < end for position in self._missing)
        ]

    def take(self, taps: Taps | None, row: int, start: int, end: int) -> None:
        """Store the states of the positions from `start` to before `end`, which begin at `row` of the batch."""
        computed = [position for position in self._missing if start <= position < end]
        for position in computed:
            assert taps is not None
            for layer in self._layers:
                self._found.append(State(layer, position, taps.kept["resid", layer][0][row + position - start].copy()))
        self._missing = [position for position in self._missing if position not in computed]

    def drain(self) -> tuple[State, ...]:
        """Return the states collected since the last call."""
        states, self._found = tuple(self._found), []
        return states

    def fork(self) -> Self:
        """Return a copy for another answer to the same prompt."""
        other = copy.copy(self)
        other._found = list(self._found)
        return other
