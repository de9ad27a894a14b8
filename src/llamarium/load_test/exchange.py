"""One request and its outcome: arrival times of its pieces, the server's token counts, its failure; limits of latency.

Times are seconds of `time.perf_counter`. A piece is an event with text, not one with only a role, the usage or an empty
text.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise

from llamarium.errors import OptionError
from llamarium.load_test.workload import LoadRequest


class Failure(Exception):
    """The failure of an exchange: a kind, as "timeout" or "http 429", for counts of errors, and a message."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind, self.message = kind, message


@dataclass(frozen=True, slots=True)
class ReportedUsage:
    """The server's token counts; of the prompt, `cached_tokens` were cached, or None if it does not report them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None


@dataclass(slots=True)
class Exchange:
    """A request, timed.

    Attributes:
        start: When it was sent, or was due.
        arrivals: When the bytes of each piece could be read.
        end: When the last bytes arrived, or it failed.
        usage: None if the server reports none.
        failure: None if the answer is complete.
    """

    request: LoadRequest
    start: float
    arrivals: list[float] = field(default_factory=list[float])
    end: float = 0.0
    usage: ReportedUsage | None = None
    failure: Failure | None = None

    @property
    def ttft_s(self) -> float:
        """Seconds until the first piece (time to first token)."""
        return self.arrivals[0] - self.start

    @property
    def e2e_s(self) -> float:
        """Seconds until the end of the answer (end to end)."""
        return self.end - self.start

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between each piece and the one before it (inter-token latency)."""
        return [later - earlier for earlier, later in pairwise(self.arrivals)]

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer by the server's count, else its pieces."""
        return self.usage.completion_tokens if self.usage else len(self.arrivals)

    @property
    def tpot_s(self) -> float | None:
        """Seconds for each token after the first (time per output token); None for a single token."""
        return (self.arrivals[-1] - self.arrivals[0]) / (self.num_tokens - 1) if self.num_tokens > 1 else None


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
