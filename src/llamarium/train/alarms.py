"""Alarms of a run: high KL, a rising reward with collapsing answers, a validation loss that no longer improves.

An alarm does not end a run. It is raised once per episode: it stays active from the step at which its condition holds
until the condition clearly no longer does. The state is part of the checkpoint, so a resumed run raises the same alarms
as an uninterrupted one. Torch-free.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from llamarium.errors import TrainingError, show_value
from llamarium.train.config import GRPOConfig, RunConfig

WINDOW = 10
"""Number of first steps and of latest steps whose mean rewards, lengths and entropies are compared."""

_OVER = 0.8  # an active alarm ends at this fraction of its bound, so a value around the bound raises only one alarm

AlarmName = Literal["kl", "length", "entropy", "validation"]
NAMES: tuple[AlarmName, ...] = ("kl", "length", "entropy", "validation")
_COLLAPSING: tuple[tuple[AlarmName, str, str], ...] = (
    ("length", "the answers' length", "tokens"),
    ("entropy", "the answers' entropy", "nats per token"),
)


@dataclass(slots=True)
class AlarmState:
    """State of a run's alarms.

    Attributes:
        active: Names of the active alarms.
        first: Reward, length and entropy of the first `WINDOW` steps.
        last: The same for the latest `WINDOW` steps.
        num_worse: Consecutive validations that were worse than the best one.
    """

    active: list[str] = field(default_factory=list[str])
    first: list[list[float]] = field(default_factory=list[list[float]])
    last: list[list[float]] = field(default_factory=list[list[float]])
    num_worse: int = 0

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "AlarmState":
        """Read a state from the dict that `dataclasses.asdict` returns; TrainingError for invalid values."""
        num_worse: object = raw.get("num_worse", 0)
        active, first, last = (_list(raw.get(name, [])) for name in ("active", "first", "last"))
        good = type(num_worse) is int and num_worse >= 0 and all(name in NAMES for name in active)
        if not good or not all(len(rows) <= WINDOW and all(map(_is_row, rows)) for rows in (first, last)):
            raise TrainingError(f"alarms is {show_value(raw)}; expected the state of a run's alarms")
        return cls(active, first, last, cast(int, num_worse))


def _list(value: object) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else [None]


def _is_row(row: object) -> bool:
    numbers = cast("list[object]", row) if isinstance(row, list) else []
    return len(numbers) == 3 and all(type(number) in (int, float) for number in numbers)


class Alarms:
    """Checks a run's steps and validations, and returns an event for each alarm that is raised or has ended.

    `state` is updated in place.
    """

    def __init__(self, config: RunConfig, state: AlarmState) -> None:
        self._state, self._num_validations = state, config.alarm_validations
        is_rewarded = isinstance(config, GRPOConfig)
        self._measured, self._sign = ("reward", -1) if is_rewarded else ("loss", 1)
        self._kl = config.alarm_kl if is_rewarded else 0.0
        self._collapse = config.alarm_collapse if is_rewarded else 0.0

    def after_step(self, step: int, metrics: Mapping[str, float]) -> list[dict[str, Any]]:
        """Return the events for a step with these metrics."""
        events: list[dict[str, Any]] = []
        if self._kl and "kl" in metrics:
            kl, bound = metrics["kl"], self._kl
            message = (
                f"KL is {kl:.3g} nats per token, above alarm_kl, {bound:g}: the model has moved far from the "
                "reference; raise beta, or lower the learning rate"
            )
            events += self._judge("kl", step, kl, bound, message, is_bad=not kl <= bound, is_over=kl < _OVER * bound)
        if self._collapse and "entropy" in metrics:
            events += self._after_answers(step, [metrics["reward"], metrics["length"], metrics["entropy"]])
        return events

    def _after_answers(self, step: int, row: list[float]) -> list[dict[str, Any]]:
        """Compare the rewards, lengths and entropies of the latest steps with those of the first steps."""
        state, events = self._state, list[dict[str, Any]]()
        if len(state.first) < WINDOW:
            state.first.append(row)
            return events
        state.last = [*state.last, row][-WINDOW:]
        if len(state.last) < WINDOW:
            return events

        before, now = (_means(rows) for rows in (state.first, state.last))
        for place, (name, what, unit) in enumerate(_COLLAPSING, start=1):
            bound = self._collapse * before[place]
            message = (
                f"the mean reward rose from {before[0]:.3g} to {now[0]:.3g} while {what} fell from {before[place]:.3g} "
                f"to {now[place]:.3g} {unit}, below alarm_collapse, {self._collapse:g} of the first {WINDOW} steps; "
                "look at some answers: the reward may pay for something else than what you want"
            )
            is_up, is_low = now[0] > before[0], now[place] < bound
            is_over = not is_up or _OVER * now[place] > bound
            events += self._judge(name, step, now[place], bound, message, is_bad=is_up and is_low, is_over=is_over)
        return events

    def after_validation(self, step: int, loss: float, best_loss: float, best_step: int | None) -> list[dict[str, Any]]:
        """Return the events for a validation with this loss; `best_loss` is the lowest so far, including this one."""
        state, most = self._state, self._num_validations
        is_worse = not loss <= best_loss
        state.num_worse = state.num_worse + 1 if is_worse else 0
        message = (
            f"the last {state.num_worse} validations are worse than the best, a {self._measured} of "
            f"{self._sign * best_loss:z.4g} at step {best_step}: more steps may only overfit; the checkpoint `best` "
            "has the weights of that step"
        )
        is_bad = 0 < most <= state.num_worse
        value = self._sign * loss
        return self._judge(
            "validation", step, value, self._sign * best_loss, message, is_bad=is_bad, is_over=not is_worse
        )

    def _judge(
        self, name: AlarmName, step: int, value: float, bound: float, message: str, *, is_bad: bool, is_over: bool
    ) -> list[dict[str, Any]]:
        """Return the event if the alarm is raised or has ended, else nothing."""
        active, about = self._state.active, {"step": step, "alarm": name, "value": value, "bound": bound}
        if name not in active and is_bad:
            active.append(name)
            return [{"event": "alarm", **about, "message": message}]
        if name in active and is_over:
            active.remove(name)
            return [{"event": "alarm_over", **about}]
        return []


def _means(rows: list[list[float]]) -> list[float]:
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]
