"""A run's history, read from its journal; values in the file are not trusted."""

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from llamarium.config import ModelConfig
from llamarium.cost import kv_bytes_per_token
from llamarium.errors import LlamariumError, TrainingError, escape
from llamarium.train.journal import NAME, read_journal

T = TypeVar("T")
Event = Mapping[str, Any]

_MAX_CURVES = 64  # a file may have any number of names
_NO_METRICS = {"event", "step", "epoch", "num_tokens", "seconds", "seconds_left", "best"}


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric over the steps of a run.

    Attributes:
        event: Kind of the events that have it.
        name: Its field there, such as "loss" or "reward/NAME".
        steps: The steps, ascending.
        values: Its value at each.
    """

    event: Literal["step", "validation"]
    name: str
    steps: tuple[float, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Alarm:
    """An alarm that was raised at a step; `end` is the step at which it was over, if it was."""

    name: str
    step: int
    end: int | None
    message: str


@dataclass(frozen=True, slots=True)
class Sample:
    """A text that the model wrote at a step, or why there is none."""

    step: int
    prompt: str
    text: str
    error: str


@dataclass(frozen=True, slots=True)
class RewardedAnswer:
    """An answer of a group; None where the journal has no number."""

    text: str
    reward: float | None
    advantage: float | None
    parts: dict[str, float]


@dataclass(frozen=True, slots=True)
class Group:
    """A prompt that was answered several times, the best answer first."""

    step: int
    prompt: str
    answers: tuple[RewardedAnswer, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """A source of a mixture: its share of the draws, and the passes over it in an epoch."""

    source: str
    weight: float | None
    share: float | None
    passes: float | None
    tokens: float | None


@dataclass(frozen=True, slots=True)
class RunHistory:
    """What a run has written about itself.

    Attributes:
        state: "open" if the run is going on or was killed; "stopped" if it ended before its last step.
        step: Last step in the journal.
        num_steps: Steps of a whole run.
        threads: Number of threads on a CPU.
        seconds: Time spent in steps.
        tokens_per_s: Median throughput, without the first value, which includes warm-up.
        kv_bytes: KV cache per token in bfloat16.
        loss: Last training loss.
        mfu: Last model FLOPs utilization.
        best_step: Step of the best validation: that of `best_reward`, or else of `best_loss`.
        best_loss: Lowest validation loss.
        best_reward: Highest validation reward; None if the run is not trained for one.
        skipped: Number of skipped updates by reason.
    """

    state: Literal["open", "stopped", "finished"]
    step: int
    num_steps: int | None
    device: str
    threads: int | None
    parameters: float | None
    trainable: float | None
    num_tokens: float | None
    seconds: float | None
    tokens_per_s: float | None
    kv_bytes: int | None
    loss: float | None
    mfu: float | None
    best_step: float | None
    best_loss: float | None
    best_reward: float | None
    curves: tuple[Curve, ...]
    alarms: tuple[Alarm, ...]
    skipped: dict[str, int]
    samples: tuple[Sample, ...]
    groups: tuple[Group, ...]
    sources: tuple[Source, ...]
    settings: dict[str, str]

    def values(self, event: str, name: str) -> tuple[float, ...]:
        """Return the values of a curve; none if there is no such curve."""
        return next((c.values for c in self.curves if (c.event, c.name) == (event, name)), ())

    def thinned(self, *, points: int, texts: int) -> "RunHistory":
        """Return the history with so many points of each curve, and so many samples and groups, at most."""
        return replace(
            self,
            curves=tuple(_thinned(curve, points) for curve in self.curves),
            samples=tuple(spread(self.samples, texts)),
            groups=tuple(spread(self.groups, texts)),
        )


def has_history(run: Path) -> bool:
    """Return whether a folder has a run's journal."""
    return (run / NAME).is_file()


def read_history(run: Path) -> RunHistory:
    """Read a run's journal; TrainingError if it is missing or malformed."""
    events = list(read_journal(run / NAME))
    starts = [event for event in events if event["event"] in ("start", "resume")]
    if not starts:
        raise TrainingError(f"{escape(run)}: has no {NAME} with the start of a run; expected a run's folder")
    start = starts[-1]
    events = [event for event in events if number_of(event["step"]) is not None]
    settings = _object(start.get("settings"))
    num_steps, threads = number_of(settings.get("steps")), number_of(start.get("threads"))
    curves = tuple(_curves(events))
    if start.get("is_counted") is True and num_steps is not None:  # an n-gram model has one loss for all steps
        curves = tuple(replace(c, steps=(*c.steps, num_steps), values=(*c.values, c.values[-1])) for c in curves)
    speeds = [value for curve in curves if curve.name == "tokens_per_s" for value in curve.values]
    best_loss = min(_validations(curves, "loss"), default=None)
    best_reward = max(_validations(curves, "reward"), default=None, key=lambda pair: pair[0])
    best = best_reward or best_loss
    return RunHistory(
        state=_state(events),
        step=max((int(event["step"]) for event in events), default=0),
        num_steps=None if num_steps is None else int(num_steps),
        device=_text(start.get("device", "?")),
        threads=None if threads is None else int(threads),
        parameters=number_of(start.get("parameters")),
        trainable=number_of(start.get("trainable")),
        num_tokens=_last(events, "num_tokens"),
        seconds=_last(events, "seconds"),
        tokens_per_s=statistics.median(speeds[1:] or speeds) if speeds else None,
        kv_bytes=_kv_bytes(start, run),
        loss=_last(events, "loss"),
        mfu=_last(events, "mfu"),
        best_step=None if best is None else best[1],
        best_loss=None if best_loss is None else best_loss[0],
        best_reward=None if best_reward is None else best_reward[0],
        curves=curves,
        alarms=tuple(_alarms(events)),
        skipped=dict(Counter(_text(e.get("reason", "not finite")) for e in events if e["event"] == "skipped")),
        samples=tuple(_sample(event) for event in events if event["event"] == "sample"),
        groups=tuple(_group(event) for event in events if event["event"] == "group"),
        sources=tuple(_sources(start)),
        settings={_text(name): "-" if value is None else _text(value) for name, value in settings.items()},
    )


def number_of(value: object) -> float | None:
    """Convert a number from a file to a float; None for other values and extreme numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not abs(value) < 1e100:  # NaN, too
        return None
    return float(value) if abs(value) > 1e-100 else 0.0


def spread(items: Sequence[T], most: int) -> list[T]:
    """Choose up to `most` evenly spaced items, including the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def _state(events: Sequence[Event]) -> Literal["open", "stopped", "finished"]:
    if not events or events[-1]["event"] != "end":
        return "open"
    return "stopped" if events[-1].get("signal") or events[-1].get("early") else "finished"


def _curves(events: Sequence[Event]) -> Iterator[Curve]:
    """Yield the metrics of steps and validations, without values that are not numbers."""
    found: dict[tuple[Literal["step", "validation"], str], list[tuple[float, float]]] = {}
    for event in events:
        kind: Literal["step", "validation"]
        if event["event"] == "step":
            kind = "step"
        elif event["event"] == "validation":
            kind = "validation"
        else:
            continue
        for name in event.keys() - _NO_METRICS:
            value = number_of(event[name])
            if value is not None and ((kind, name) in found or len(found) < _MAX_CURVES):
                found.setdefault((kind, name), []).append((float(event["step"]), value))
    for (kind, name), points in sorted(found.items()):
        steps, values = zip(*sorted(points), strict=True)
        yield Curve(kind, _text(name), steps, values)


def _validations(curves: Sequence[Curve], name: str) -> list[tuple[float, float]]:
    """Return the value and the step of each validation."""
    found = (curve for curve in curves if (curve.event, curve.name) == ("validation", name))
    return [pair for curve in found for pair in zip(curve.values, curve.steps, strict=True)]


def _thinned(curve: Curve, most: int) -> Curve:
    """Average adjacent points of a long curve."""
    size = max(1, math.ceil(len(curve.steps) / most))

    def means(numbers: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(statistics.fmean(numbers[start : start + size]) for start in range(0, len(numbers), size))

    return curve if size == 1 else replace(curve, steps=means(curve.steps), values=means(curve.values))


def _alarms(events: Sequence[Event]) -> list[Alarm]:
    alarms: list[Alarm] = []
    for event in events:
        name, step = _text(event.get("alarm", "")), int(event["step"])
        if event["event"] == "alarm":
            alarms.append(Alarm(name, step, None, _text(event.get("message", ""))))
        elif event["event"] == "alarm_over":
            raised = [i for i, alarm in enumerate(alarms) if alarm.name == name]
            if raised:
                alarms[raised[-1]] = replace(alarms[raised[-1]], end=step)
    return alarms


def _sample(event: Event) -> Sample:
    return Sample(int(event["step"]), *(_text(event.get(name, "")) for name in ("prompt", "text", "error")))


def _group(event: Event) -> Group:
    answers: list[RewardedAnswer] = []
    for answer in (_object(a) for a in _list(event.get("answers")) if isinstance(a, dict)):
        numbers = ((name, number_of(value)) for name, value in _object(answer.get("parts")).items())
        parts = {_text(name): value for name, value in numbers if value is not None}
        reward, advantage = number_of(answer.get("reward")), number_of(answer.get("advantage"))
        answers.append(RewardedAnswer(_text(answer.get("text", "")), reward, advantage, parts))
    answers.sort(key=lambda answer: -(answer.advantage or 0.0))
    return Group(int(event["step"]), _text(event.get("prompt", "")), tuple(answers))


def _sources(start: Event) -> Iterator[Source]:
    for part in (_object(p) for p in _list(_object(start.get("data")).get("sources")) if isinstance(p, dict)):
        numbers = (number_of(part.get(name)) for name in ("weight", "share", "passes", "tokens"))
        yield Source(_text(part.get("source", "")), *numbers)


def _kv_bytes(start: Event, run: Path) -> int | None:
    try:
        return kv_bytes_per_token(ModelConfig.from_hf(_object(start.get("model")), f"{run / NAME}"))
    except LlamariumError:
        return None


def _last(events: Sequence[Event], name: str) -> float | None:
    numbers = (number_of(event.get(name)) for event in reversed(events) if event["event"] == "step")
    return next((number for number in numbers if number is not None), None)


def _object(value: object) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


def _text(value: object) -> str:
    """Return a value as text; a lone surrogate, which JSON may have, becomes a question mark."""
    return str(value).encode("utf-8", "replace").decode()
