"""Numbers of tokens: fixed, or drawn for each request."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from llamarium.errors import OptionError

_SPELLINGS = "N, uniform:LOW:HIGH or lognormal:MEAN:SIGMA"


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of whole numbers of at least 1.

    Attributes:
        spelling: As on the command line.
        draw: Returns the next one, from a generator of random numbers.
    """

    spelling: str
    draw: Callable[[random.Random], int]

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """Read `N`, `uniform:LOW:HIGH` (inclusive) or `lognormal:MEAN:SIGMA`.

        MEAN is the mean of the drawn numbers; SIGMA the standard deviation of its logarithm.
        """
        kind, *words = text.split(":")
        try:
            if not words:
                return cls(text, _uniform(int(kind), int(kind)))
            first, second = words
            if kind == "uniform":
                return cls(text, _uniform(int(first), int(second)))
            if kind == "lognormal":
                return cls(text, _lognormal(float(first), float(second)))
        except ValueError:
            pass
        raise OptionError(f"expected {_SPELLINGS}, with numbers of at least 1 (SIGMA: 0), found {text!r}")


def _uniform(low: int, high: int) -> Callable[[random.Random], int]:
    if not 1 <= low <= high:
        raise ValueError
    return lambda source: source.randint(low, high)


def _lognormal(mean: float, sigma: float) -> Callable[[random.Random], int]:
    if not (1 <= mean < math.inf and 0 <= sigma < math.inf):
        raise ValueError
    middle = math.log(mean) - sigma**2 / 2  # so that the mean of the drawn numbers is `mean`
    return lambda source: max(1, round(source.lognormvariate(middle, sigma)))
