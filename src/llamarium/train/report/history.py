"""A run's history from its journal; values in the file are not trusted."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from llamarium.config import ModelConfig
from llamarium.cost import kv_bytes_per_token
from llamarium.errors import LlamariumError, TrainingError, escape
from llamarium.train.report.journal import NAME, read_journal
from llamarium.train.report.page import Point


@dataclass(frozen=True, slots=True)
class History:
    """A run's folder and events, and the newest "start" or "resume" event, which has settings and architecture."""

    run: Path
    events: Sequence[Mapping[str, Any]]
    start: Mapping[str, Any]

    @classmethod
    def read(cls, run: Path) -> "History":
        """Read a run's journal; TrainingError if it is missing or malformed."""
        events = list(read_journal(run / NAME))
        begun = [event for event in events if event["event"] in ("start", "resume")]
        if not begun:
            raise TrainingError(f"{escape(run)}: has no {NAME} with the start of a run; expected a run's folder")
        return cls(run, events, begun[-1])

    def of(self, kind: str) -> list[Mapping[str, Any]]:
        """Return the events of a kind whose step is a number."""
        return [event for event in self.events if event["event"] == kind and number_of(event["step"]) is not None]

    def curve(self, kind: str, field: str) -> list[Point]:
        """Return a field of a kind of event over the steps, without values that are not numbers."""
        pairs = ((float(event["step"]), number_of(event.get(field))) for event in self.of(kind))
        return sorted((x, y) for x, y in pairs if y is not None)

    def last(self, kind: str, field: str) -> float | None:
        """Return the last value of such a curve."""
        points = self.curve(kind, field)
        return points[-1][1] if points else None

    def validations(self) -> list[Point]:
        """Return the validation loss over the steps; that of an n-gram model is constant over all steps."""
        points, end = self.curve("validation", "loss"), number_of(self.section("settings").get("steps"))
        return [*points, (end, points[-1][1])] if points and end and self.start.get("is_counted") is True else points

    def best(self) -> Point | None:
        """Return the step and value of the lowest validation loss."""
        return min(self.curve("validation", "loss"), key=lambda point: point[1], default=None)

    def tokens_per_s(self) -> float | None:
        """Return the median throughput, without the first value, which includes warm-up."""
        speeds = [y for _, y in self.curve("step", "tokens_per_s")]
        return statistics.median(speeds[1:] or speeds) if speeds else None

    def section(self, name: str) -> dict[str, Any]:
        """Return an object of the starting event, such as its settings."""
        found = self.start.get(name)
        return cast(dict[str, Any], found) if isinstance(found, dict) else {}

    def kv_bytes(self) -> int | None:
        """Return the KV cache's bytes per token in bfloat16, or None if the architecture is unknown."""
        try:
            return kv_bytes_per_token(ModelConfig.from_hf(self.section("model"), f"{self.run / NAME}"))
        except LlamariumError:
            return None


def number_of(value: object) -> float | None:
    """Convert a number from a file to a float; None for other values and extreme numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not abs(value) < 1e100:  # NaN, too
        return None
    return float(value) if abs(value) > 1e-100 else 0.0
