"""One request and its measurements: arrival times of pieces, token counts, failure; and latency goals.

Times are in seconds of `time.perf_counter`. A piece is an event with text; events with only a role, the usage or an
empty text do not count.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise

from llamarium.errors import OptionError
from llamarium.load_test.workload import LoadRequest


class Failure(Exception):
    """The failure of an exchange.

    Attributes:
        kind: Kind of failure, by which failures are counted, e.g. "timeout" or "http 429".
        message: Error message.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind, self.message = kind, message


@dataclass(frozen=True, slots=True)
class ReportedUsage:
    """The server's token counts.

    Attributes:
        prompt_tokens: Prompt tokens.
        completion_tokens: Generated tokens.
        cached_tokens: Prompt tokens read from the server's prefix cache; None if it does not report them.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None


@dataclass(slots=True)
class Exchange:
    """A request and its measurements.

    Attributes:
        request: The request.
        start: When the request was sent, or was due.
        arrivals: Arrival times of the pieces.
        end: When the last event arrived, or the request failed.
        usage: The server's token counts; None if it reports none.
        failure: The failure; None if the answer is complete.
    """

    request: LoadRequest
    start: float
    arrivals: list[float] = field(default_factory=list[float])
    end: float = 0.0
    usage: ReportedUsage | None = None
    failure: Failure | None = None

    @property
    def ttft_s(self) -> float:
        """Time to first token, i.e. until the first piece, in seconds."""
        return self.arrivals[0] - self.start

    @property
    def e2e_s(self) -> float:
        """End-to-end latency, in seconds."""
        return self.end - self.start

    @property
    def gaps_s(self) -> list[float]:
        """Inter-token latencies, i.e. between consecutive pieces, in seconds."""
        return [later - earlier for earlier, later in pairwise(self.arrivals)]

    @property
    def num_tokens(self) -> int:
        """Number of generated tokens reported by the server, or of pieces if it reports none."""
        return self.usage.completion_tokens if self.usage else len(self.arrivals)

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first one, in seconds; None for a single token."""
        return (self.arrivals[-1] - self.arrivals[0]) / (self.num_tokens - 1) if self.num_tokens > 1 else None


@dataclass(frozen=True, slots=True)
class Goal:
    """Latency limits for goodput, in seconds; None is no limit.

    Attributes:
        ttft_s: Maximum time to first token.
        itl_s: Maximum inter-token latency, for every pair of consecutive pieces.
        tpot_s: Maximum time per output token.
        e2e_s: Maximum end-to-end latency.
    """

    ttft_s: float | None = None
    itl_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    @classmethod
    def parse(cls, words: Sequence[str]) -> "Goal":
        """Parse limits in milliseconds, e.g. `ttft:500`, `itl:50`, `tpot:40`, `e2e:3000`; OptionError if invalid."""
        names, limits = [field.name.removesuffix("_s") for field in fields(cls)], dict[str, float]()
        for word in words:
            name, _, number = word.partition(":")
            try:
                limit_s = float(number) / 1000
            except ValueError:
                limit_s = math.nan
            if name not in names or f"{name}_s" in limits or not 0 < limit_s < math.inf:
                raise OptionError(
                    f"expected {', '.join(names)}, each once with milliseconds as in ttft:500, found {word!r}"
                )
            limits[f"{name}_s"] = limit_s
        return cls(**limits)

    def is_met(self, exchange: Exchange) -> bool:
        """Whether a complete answer is within all limits."""
        limits = (
            (self.ttft_s, exchange.ttft_s),
            (self.itl_s, max(exchange.gaps_s, default=0.0)),
            (self.tpot_s, exchange.tpot_s or 0.0),
            (self.e2e_s, exchange.e2e_s),
        )
        return all(limit is None or value <= limit for limit, value in limits)
