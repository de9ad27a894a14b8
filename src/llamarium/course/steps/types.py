"""The arrays that the steps' functions take and return, and what several of them are tried with."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.integer[Any]]
Bools = NDArray[np.bool_]


def floats(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> Floats:
    """Return normal random numbers of this shape."""
    return (scale * rng.normal(size=shape)).astype(np.float32)


def softmax(x: Floats, axis: int = -1) -> Floats:
    """Return the shares of numbers along an axis, in float64."""
    powers = np.exp(x.astype(np.float64) - x.max(axis=axis, keepdims=True))
    return powers / powers.sum(axis=axis, keepdims=True)
