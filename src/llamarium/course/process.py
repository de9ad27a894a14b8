"""Runs checks in a separate process with limits of time and memory."""

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TypeVar

from llamarium.course.check import Result
from llamarium.course.limits import CALL_S
from llamarium.course.outline import step_named
from llamarium.course.whole import Whole
from llamarium.errors import InputError, escape
from llamarium.runtime.process.child import EndedError, Process

LAST_S = 600.0
"""Wall-clock limit of an answer, for code that waits and cannot be interrupted. A check needs seconds of CPU time,
which even a busy machine provides within this limit."""

_DISTURBED = "ended", "writes to or closes a file descriptor that it did not open; a step only returns a result"

_Found = TypeVar("_Found", Result, Whole)


def check_in_process(folder: Path, steps: Sequence[str], *, seed: int, limit_s: float = CALL_S) -> Iterator[Result]:
    """Check steps in a separate process, and yield each result.

    Args:
        folder: The learner's folder.
        steps: Names of the steps.
        seed: Seed for sentences, shapes and numbers.
        limit_s: Maximum CPU time of one call, in seconds.

    Raises:
        InputError: If the process cannot load the model, or the model cannot encode the course's texts.
    """
    with closing(_Checks(folder, steps, limit_s)) as checks:
        for name in steps:
            try:
                yield checks.ask(Result, name, seed)
            except _FailedError as failed:
                yield Result(name, failed.status, failed.words, section=step_named(name).section)


def whole_in_process(folder: Path, *, limit_s: float = CALL_S) -> Whole:
    """Run the whole model in a separate process and return the comparison; errors as for `check_in_process`."""
    with closing(_Checks(folder, ("whole",), limit_s)) as checks:
        try:
            return checks.ask(Whole, "whole", 0)
        except _FailedError as failed:
            return Whole(error=failed.words)


class _FailedError(Exception):
    """A check without a result, because a function ended, blocked or disturbed the process."""

    def __init__(self, status: str, words: str) -> None:
        self.status, self.words = status, words


class _Checks:
    """The process that runs checks; restarted when it has ended."""

    def __init__(self, folder: Path, steps: Sequence[str], limit_s: float) -> None:
        worker = (sys.executable, "-P", "-m", "llamarium.course.worker")
        self._command = (*worker, str(folder.resolve()), ",".join(steps))
        self._limit_s = limit_s
        self._process: Process | None = None

    def close(self) -> None:
        if self._process is not None:
            self._process.end()

    def ask(self, kind: type[_Found], step: str, seed: int) -> _Found:
        """Return the result of a step's check; _FailedError if the process returns none."""
        process, is_new = self._process, False
        if process is None or not process.is_running:
            self.close()
            self._process, is_new = self._begun(), True
            process = self._process
        try:
            answer = process.ask({"step": step, "seed": seed, "limit_s": self._limit_s}, LAST_S)
        except EndedError as ended:
            if ended.layer < 0 and not ended.is_late and not is_new:  # between two steps: retry
                return self.ask(kind, step, seed)
            raise _FailedError(*self._why(ended)) from None
        try:
            return kind(**answer["found"])
        except (KeyError, TypeError):  # written by the learner's function
            self.close()
            raise _FailedError(*_DISTURBED) from None

    def _begun(self) -> Process:
        process = Process(self._command, 1)  # one thread, as several would wait for each other on a busy machine
        try:
            answer = process.begin()
        except EndedError as ended:
            words = "it takes too long" if ended.is_late else ended.words()
            raise InputError(f"cannot load the model for a check: {words}") from None
        if "error" in answer:
            raise InputError(answer["error"])
        return process

    def _why(self, ended: EndedError) -> tuple[str, str]:
        """Return status and message for a process that did not answer."""
        if ended.is_late:
            return "time", f"takes longer than {LAST_S:g} s"
        if ended.code in (-signal.SIGKILL, -signal.SIGXCPU):
            return "time", f"takes longer than {self._limit_s:g} s of CPU time"
        if ended.code is None:
            return _DISTURBED
        error_lines = ended.stderr.strip().splitlines()
        if ended.code == 1 and error_lines:
            return "ended", f"interferes with the check: {escape(error_lines[-1])}"
        return "ended", f"{ended.words()}; a step only returns a result"
