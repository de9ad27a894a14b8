"""A learner's progress, stored in the folder."""

import hashlib
import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamarium.course.check import Result
from llamarium.course.outline import file_of, step_named
from llamarium.course.step import Step
from llamarium.course.steps import STEPS
from llamarium.io import read_small, write_json

PROGRESS = "progress.json"

_changing = threading.Lock()
"""Held while the file is read and written. Other processes always see a complete file, but may overwrite a change."""


@dataclass(frozen=True, slots=True)
class Reached:
    """The progress of a step.

    Attributes:
        tries: Number of checks.
        hints: Number of hints that were read; the third one is the solution.
        is_right: Whether the current version of the file has passed.
    """

    tries: int = 0
    hints: int = 0
    is_right: bool = False


def progress(folder: Path) -> dict[str, Reached]:
    """Return the progress of each step, by name."""
    kept = _read(folder)
    return {step.name: _reached(folder / file_of(step), kept.get(step.name, {})) for step in STEPS}


def keep(folder: Path, result: Result) -> None:
    """Save the result of a check; OSError if it cannot be written."""
    with _entry(folder, result.step) as entry:
        entry["tries"] = _count(entry, "tries") + 1
        if result.passed:
            entry["right"] = _digest(folder / file_of(step_named(result.step)))


def keep_hints(folder: Path, step: Step, depth: int) -> None:
    """Save the number of hints that were read; OSError if it cannot be written."""
    with _entry(folder, step.name) as entry:
        entry["hints"] = max(depth, _count(entry, "hints"))


@contextmanager
def _entry(folder: Path, name: str) -> Generator[dict[str, Any]]:
    """Yield the stored entry of a step, and write it after the body has changed it."""
    with _changing:
        kept = _read(folder)
        yield kept.setdefault(name, {})
        write_json(folder / PROGRESS, kept)


def _reached(path: Path, entry: dict[str, Any]) -> Reached:
    right = entry.get("right")
    return Reached(_count(entry, "tries"), _count(entry, "hints"), right is not None and right == _digest(path))


def _count(entry: dict[str, Any], name: str) -> int:
    count = entry.get(name)
    return count if isinstance(count, int) and count > 0 else 0


def _read(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the file's entries; damaged ones are dropped."""
    try:
        raw: Any = json.loads(read_small(folder / PROGRESS))
    except (OSError, ValueError, RecursionError):
        return {}
    entries: dict[str, Any] = raw if isinstance(raw, dict) else {}
    return {step.name: entries[step.name] for step in STEPS if isinstance(entries.get(step.name), dict)}


def _digest(path: Path) -> str | None:
    try:
        return hashlib.sha256(read_small(path)).hexdigest()
    except OSError:
        return None
