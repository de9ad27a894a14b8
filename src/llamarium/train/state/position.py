"""A run's position as JSON, saved with every checkpoint and checked when it is read.

A manifest proves that a file is as written, but anyone can write a manifest; so every value is checked.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from llamarium.errors import TrainingError, show_value
from llamarium.train.data.order import Cursor

T = TypeVar("T")


@dataclass(slots=True)
class Position:
    """Position of a run.

    Attributes:
        step: Completed optimizer steps.
        cursor: Position in the data.
        num_tokens: Input tokens so far, prompts and padding included.
        seconds: Time spent in steps.
        best_loss: The lowest validation loss so far; infinite if none was measured on the current rows.
        best_step: The step of the best checkpoint, until there is a lower loss.
    """

    step: int = 0
    cursor: Cursor = field(default_factory=Cursor)
    num_tokens: int = 0
    seconds: float = 0.0
    best_loss: float = math.inf
    best_step: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        best = None if math.isinf(self.best_loss) else self.best_loss
        return dataclasses.asdict(self) | {"best_loss": best}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "Position":
        """Read the result of `to_dict`; TrainingError for invalid values."""
        cursor = entry(raw, "cursor", dict)
        best_step, best_loss = raw.get("best_step"), raw.get("best_loss")
        return cls(
            step=_count(raw, "step"),
            cursor=Cursor(_count(cursor, "epoch"), _count(cursor, "index")),
            num_tokens=_count(raw, "num_tokens"),
            seconds=_count(raw, "seconds", float),
            best_loss=math.inf if best_loss is None else _count(raw, "best_loss", float),
            best_step=None if best_step is None else _count(raw, "best_step"),
        )


def entry(raw: Mapping[str, Any], name: str, kind: type[T]) -> T:
    """Return an entry of a JSON object; TrainingError if it is missing or of another type."""
    value = raw.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TrainingError(f"{name} is {show_value(value)}; expected {kind.__name__}")
    return value


def _count(raw: Mapping[str, Any], name: str, kind: type[Any] = int) -> Any:
    """Return a number of a JSON object; TrainingError if it is none from 0 on."""
    value = entry(raw, name, kind)
    if not 0 <= value < 2**63:  # NaN is not, either
        raise TrainingError(f"{name} is {show_value(value)}; expected a number from 0 to 2^63")
    return value
