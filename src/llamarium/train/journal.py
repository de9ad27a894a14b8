"""`metrics.jsonl`: everything that happened in a run, one event a line, written at once.

A run that is resumed goes on from a checkpoint, and what came after that never happened: it is cut off, so that the
file is always the history of the weights that there are.
"""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llamarium.errors import OutputError, TrainingError
from llamarium.train.run import Event

NAME = "metrics.jsonl"


class Journal:
    """Appends events to a run's `metrics.jsonl`.

    Args:
        run: The run's folder.

    Raises:
        OutputError: If it cannot be written.
    """

    def __init__(self, run: Path) -> None:
        self.path = run / NAME

    def __call__(self, event: Event) -> None:
        """Write one event; a "start" empties the file first, and a "resume" cuts it to the step it goes on from."""
        if event["event"] == "start":
            self._rewrite([])
        elif event["event"] == "resume":
            self._rewrite(
                [old for old in read_journal(self.path) if old["step"] <= event["step"] and old["event"] != "end"]
            )
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(_line(event))
        except OSError as error:
            raise OutputError(f"{self.path}: cannot be written: {error.strerror}") from None

    def _rewrite(self, events: list[dict[str, Any]]) -> None:
        partial = self.path.with_suffix(".partial")
        try:
            with partial.open("w", encoding="utf-8") as file:
                file.writelines(map(_line, events))
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self.path)
        except OSError as error:
            raise OutputError(f"{self.path}: cannot be written: {error.strerror}") from None


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """Yield a run's events; none where there is no file. A last line that was cut off is left out.

    Raises:
        TrainingError: If a line is no event.
    """
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last newline was not finished
        try:
            event = json.loads(line)
        except ValueError:
            raise TrainingError(f"{path}:{number}: is no JSON; expected the events of a run") from None
        if not isinstance(event, dict) or "event" not in event or "step" not in event:
            raise TrainingError(f"{path}:{number}: is no event of a run")
        yield event


def _line(event: Event) -> str:
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in event.items()}
    return json.dumps(finite, allow_nan=False) + "\n"
