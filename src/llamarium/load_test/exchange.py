"""One request and its outcome: arrival times of its pieces, the server's token counts, its failure.

Times are seconds of `time.perf_counter`. A piece is an event with text, not one with only a role, the usage or an empty
text.
"""

from dataclasses import dataclass, field
from itertools import pairwise

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
