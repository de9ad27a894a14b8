"""A row of the table of sampling parameters: a number with its name, range and takers. Never torch."""

import math
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from llamarium.errors import SamplingError, show_value

INF = math.inf

Taker = Literal["cli", "openai", "responses", "anthropic", "page", "file"]
"""A place that takes parameters under the names of this table; "file" is `generation_config.json`."""

EVERYWHERE: tuple[Taker, ...] = ("cli", "openai", "responses", "anthropic", "page", "file")
BUT_ANTHROPIC: tuple[Taker, ...] = ("cli", "openai", "responses", "page", "file")
OF_PENALTIES: tuple[Taker, ...] = ("cli", "openai", "page")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A row of the table: a parameter that is one number.

    Attributes:
        neutral: The default, without effect; if it is None, the parameter is optional.
        expected: The range in words.
        takers: The places that take it.
        is_idle_when_greedy: It has no effect at temperature 0.
    """

    name: str
    kind: type[int] | type[float]
    neutral: float | None
    low: float
    high: float
    expected: str
    takers: tuple[Taker, ...] = ()
    metavar: str = ""
    help: str = ""
    is_idle_when_greedy: bool = False

    def accepts(self, value: object) -> bool:
        """Whether `check` finds nothing wrong."""
        with suppress(SamplingError):
            self.check(value)
            return True
        return False

    def check(self, value: object) -> None:
        """Refuse a value that is out of range, by a SamplingError with the name, the value and the range."""
        if value is None and self.neutral is None:
            return
        (check_integer if self.kind is int else check_number)(self.name, value, self.low, self.high, self.expected)


def _field(kind: type, neutral: float | None, low: float, high: float, expected: str, how: dict[str, Any]) -> Any:
    row = {"kind": kind, "neutral": neutral, "low": low, "high": high, "expected": expected}
    return field(default=neutral, metadata=row | how)


def number(neutral: float, low: float, high: float, expected: str, **how: Any) -> Any:
    """Define a field of `SamplingParams` that is a number; `how` are further attributes of `Parameter`."""
    return _field(float, neutral, low, high, expected, how)


def integer(neutral: int | None, low: int, high: float = INF, **how: Any) -> Any:
    """Define a field of `SamplingParams` that is a whole number; None as its neutral value makes it optional."""
    expected = f"at least {low}" if high == INF else f"{low} to {high}"
    return _field(int, neutral, low, high, expected, how)


def check_number(name: str, value: object, low: float, high: float, expected: str) -> None:
    """Refuse what is no number of the range; SamplingError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:  # false for NaN
        raise SamplingError(f"{name} is {show_value(value)}; expected a number, {expected}")
    if name == "temperature" and 0 < value < 1e-5:  # as for 1e5: float32 cannot tell the result from greedy or uniform
        raise SamplingError(f"temperature is {value}; expected 0 (greedy) or at least 1e-5")
    if name == "top_p" and value == 0:
        raise SamplingError("top_p is 0; expected above 0 (for the most probable token alone: temperature 0)")


def check_integer(name: str, value: object, low: float, high: float, expected: str) -> None:
    """Refuse what is no whole number of the range; SamplingError."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise SamplingError(f"{name} is {show_value(value)}; expected a whole number, {expected}")
