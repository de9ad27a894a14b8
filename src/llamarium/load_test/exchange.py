"""One request and what became of it: when its pieces came, how many tokens the server counted, what went wrong.

Times are seconds of `time.perf_counter`. A piece is a part of the answer that has text in it: an event that only names
the role, the usage or an empty text is none.
"""

from dataclasses import dataclass, field
from itertools import pairwise

from llamarium.load_test.workload import LoadRequest


class Failure(Exception):
    """An exchange that did not come to its end.

    Args:
        kind: What errors are counted by: "connection", "http 429", "stream error", "broken stream", "no stream",
            "not JSON", "empty answer" or "timeout".
        message: What there is to say about this one.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind, self.message = kind, message


@dataclass(frozen=True, slots=True)
class ReportedUsage:
    """What the server counted.

    Attributes:
        prompt_tokens: That it read.
        completion_tokens: That it wrote.
        cached_tokens: Of the prompt, that it still knew; None where it does not say.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None


@dataclass(slots=True)
class Exchange:
    """A request, timed.

    Attributes:
        request: What was asked.
        start: When it was sent, or should have been.
        arrivals: When each piece came: when its bytes were there to be read.
        end: When the last bytes came, or it failed.
        usage: None where the server counts nothing.
        failure: None if the answer is whole.
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
        """Tokens of the answer, as the server counts them; its pieces where it does not."""
        return self.usage.completion_tokens if self.usage else len(self.arrivals)

    @property
    def tpot_s(self) -> float | None:
        """Seconds for each token after the first (time per output token); None where there is one alone."""
        return (self.arrivals[-1] - self.arrivals[0]) / (self.num_tokens - 1) if self.num_tokens > 1 else None
