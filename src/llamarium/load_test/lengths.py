"""How many tokens: a fixed number, or one drawn anew for each request."""

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
        """Read `N`, `uniform:LOW:HIGH` (both can come) or `lognormal:MEAN:SIGMA`.

        MEAN is the mean of what is drawn, in tokens; SIGMA the standard deviation of its logarithm.

        Raises:
            OptionError: If it is none of them, or has no number of at least 1 in it.
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
    middle = math.log(mean) - sigma**2 / 2  # then the mean of what is drawn is `mean`
    return lambda source: max(1, round(source.lognormvariate(middle, sigma)))
