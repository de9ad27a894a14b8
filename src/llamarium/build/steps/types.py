"""The arrays that the steps' functions take and return."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.integer[Any]]
Bools = NDArray[np.bool_]


def floats(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> Floats:
    """Return normal random numbers of this shape."""
    return (scale * rng.normal(size=shape)).astype(np.float32)
