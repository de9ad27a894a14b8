"""`metrics.jsonl`: the events of a run, one per line, written immediately.

When a run resumes from a checkpoint, later events are removed, so that the file is always the history of the current
weights.

The journal never stops a run: lines that cannot be written are kept and retried, and unreadable lines are removed when
the run resumes. Both cause one warning.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from llamarium.checkpoints.checkpoint import list_some
from llamarium.errors import TrainingError, escape, warn_caller
from llamarium.io import atomic_file, unwritable

NAME = "metrics.jsonl"

Event = Mapping[str, Any]
Emit = Callable[[Event], None]


def is_passing(event: Event) -> bool:
    """Return whether an event only reports current activity and is not written to the journal."""
    return event["event"] == "progress"


class Journal:
    """Appends events to a run's `metrics.jsonl`."""

    def __init__(self, run: Path) -> None:
        self.path = run / NAME
        self._waiting = b""

    def __call__(self, event: Event) -> None:
        """Write an event; "start" empties the file first, and "resume" removes events after its step.

        OutputError if these two cannot be written; TrainingError if an existing file cannot be read.
        """
        if event["event"] == "start":
            self._rewrite([event])
        elif event["event"] == "resume":
            self._rewrite([*_history(self.path, event["step"]), event])
        else:
            self._append(_line(event))

    def _rewrite(self, events: Iterable[Event]) -> None:
        try:
            with atomic_file(self.path) as file:
                file.writelines(map(_line, events))
        except OSError as error:
            raise unwritable(self.path, error) from None

    def _append(self, line: bytes) -> None:
        late, self._waiting = self._waiting, self._waiting + line
        try:
            with self.path.open("ab", buffering=0) as file:
                while self._waiting:  # a write may be partial, e.g. on a full disk
                    self._waiting = self._waiting[file.write(self._waiting) :]
        except OSError as error:
            if not late:
                warn_caller(f"{unwritable(self.path, error)}; the run goes on, and it is tried again")


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """Yield a run's events, without an incomplete last line; TrainingError for other lines."""
    for number, line in enumerate(_lines(path), start=1):
        yield _event(line, f"{escape(path)}:{number}")


def _history(path: Path, step: int) -> list[dict[str, Any]]:
    """Return the events up to a step, without "end" and unreadable lines."""
    kept: list[dict[str, Any]] = []
    damaged: list[str] = []
    for number, line in enumerate(_lines(path), start=1):
        try:
            event = _event(line, "")
            if event["step"] <= step and event["event"] != "end":
                kept.append(event)
        except (TrainingError, TypeError):  # no event, or its step is no number
            damaged.append(str(number))
    if damaged:
        problem = f"lines {list_some(damaged)} are no events of a run, and are left out from now on"
        warn_caller(f"{escape(path)}: {problem}")
    return kept


def _lines(path: Path) -> list[str]:
    """Return the complete lines."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise TrainingError(f"{escape(path)}: cannot be read: {escape(error.strerror or error)}") from None


def _event(line: str, where: str) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        raise TrainingError(f"{where}: is no JSON; expected the events of a run") from None
    if not isinstance(event, dict) or "event" not in event or "step" not in event:
        raise TrainingError(f"{where}: is no event of a run")
    return cast(dict[str, Any], event)


def _line(event: Event) -> bytes:
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in event.items()}
    return json.dumps(finite, allow_nan=False).encode() + b"\n"
