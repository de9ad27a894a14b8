"""Latency limits of a good answer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from llamarium.errors import OptionError
from llamarium.load_test.exchange import Exchange


@dataclass(frozen=True, slots=True)
class Goal:
    """Latency limits of a good answer, in seconds; None is no limit.

    Attributes:
        ttft_s: Until the first piece.
        itl_s: Between any two pieces.
        tpot_s: For each token after the first, on average.
        e2e_s: Until the end.
    """

    ttft_s: float | None = None
    itl_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    @classmethod
    def parse(cls, words: Sequence[str]) -> "Goal":
        """Read `ttft:500`, `itl:50`, `tpot:40`, `e2e:3000`: milliseconds."""
        names, found = [field.name.removesuffix("_s") for field in fields(cls)], dict[str, float]()
        for word in words:
            name, _, number = word.partition(":")
            try:
                limit_s = float(number) / 1000
            except ValueError:
                limit_s = math.nan
            if name not in names or f"{name}_s" in found or not 0 < limit_s < math.inf:
                raise OptionError(
                    f"expected {', '.join(names)}, each once with milliseconds as in ttft:500, found {word!r}"
                )
            found[f"{name}_s"] = limit_s
        return cls(**found)

    def is_met(self, exchange: Exchange) -> bool:
        """Whether a complete answer is within the limits."""
        limits = (
            (self.ttft_s, exchange.ttft_s),
            (self.itl_s, max(exchange.gaps_s, default=0.0)),
            (self.tpot_s, exchange.tpot_s or 0.0),
            (self.e2e_s, exchange.e2e_s),
        )
        return all(limit is None or value <= limit for limit, value in limits)
