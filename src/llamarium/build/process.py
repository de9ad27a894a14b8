"""Checks in a process of their own, with limits of time and memory."""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from llamarium.build.check import Result
from llamarium.build.folder.course import Course, step_named
from llamarium.build.whole import Whole
from llamarium.errors import InputError, escape

LIMIT_S = 15.0
"""How long the check of one step may compute; it may wait for the processor, or sleep, three times as long."""

_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""A check's products are small; several threads of them wait for each other, long on a busy machine."""

_LINE_BYTES = 1 << 20
"""More than any answer has."""

BEGIN_S = 60.0
"""How long the process may take until it begins: it loads a model."""


def check_in_process(
    folder: Path,
    steps: Sequence[str],
    course: Course,
    *,
    seed: int,
    limit_s: float = LIMIT_S,
) -> Iterator[Result]:
    """Yield what the check of each step found.

    Raises:
        InputError: If the process cannot load the model, or the model cannot read the course's texts.
    """
    left = list(steps)
    while left:
        for name, answer in _answers(_request(folder, course, limit_s) | {"steps": left, "seed": seed}):
            yield Result(**answer)
            left.remove(name)


def whole_in_process(folder: Path, course: Course, *, limit_s: float = LIMIT_S) -> Whole:
    """Return what the whole model does; errors as of `check_in_process`."""
    ((_, answer),) = _answers(_request(folder, course, limit_s) | {"whole": True})
    return Whole(**answer)


def _request(folder: Path, course: Course, limit_s: float) -> dict[str, Any]:
    asked = {"folder": str(folder.resolve()), "model": course.model, "texts": course.texts, "limit_s": limit_s}
    return asked | {"steps": [], "whole": False, "seed": 0}


def _answers(request: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run one process until it ends or is stopped; yield its answers, and one for what stopped it."""
    read, write = os.pipe()
    with tempfile.TemporaryFile() as said:
        worker = subprocess.Popen(
            [sys.executable, "-P", "-m", "llamarium.build.worker"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            stderr=said, pass_fds=(write,), text=True, encoding="utf-8", start_new_session=True,
            env=os.environ | ({} if request["steps"] == [] else _ONE_THREAD),
        )  # fmt: skip
        os.close(write)
        try:
            yield from _read_answers(worker, read, request | {"descriptor": write})
        except _StoppedError as stopped:
            code = _code(worker)
            said.seek(0)
            lines = said.read().decode("utf-8", "replace").strip().splitlines()
            words = stopped.words or _why(code, stopped.running, request["limit_s"], lines[-1][:200] if lines else "")
            yield _failed(stopped.running, words)
        finally:
            _kill(worker)


class _StoppedError(Exception):
    """The process ended without an answer; `running` is the step at which it was, `words` why, if that is known."""

    def __init__(self, running: str | None, words: tuple[str, str] | None = None) -> None:
        self.running, self.words = running, words


def _read_answers(
    worker: "subprocess.Popen[str]", read: int, request: dict[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    running: str | None = None
    num_answers = 0
    assert worker.stdin is not None
    with os.fdopen(read, "rb", buffering=0) as lines:
        worker.stdin.write(json.dumps(request) + "\n")
        worker.stdin.flush()  # and not closed: that ends the process
        for line in _lines(lines.fileno(), worker, 3 * request["limit_s"]):
            kind, answer = _parsed(line, running)
            if kind == "error":
                raise InputError(answer)
            if kind == "begins":
                running = answer
                continue
            assert running is not None
            yield running, answer
            running, num_answers = None, num_answers + 1
    if running is not None or (_code(worker) != 0 and not num_answers):  # between two steps: the rest is asked anew
        raise _StoppedError(running)


def _lines(descriptor: int, worker: "subprocess.Popen[str]", most_s: float) -> Iterator[bytes]:
    """Yield the lines that come, until the process ends or one takes longer than it may."""
    buffer, deadline = b"", time.monotonic() + BEGIN_S
    while True:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            _kill(worker)
            return
        data = os.read(descriptor, 1 << 16)
        if not data:
            return
        *found, buffer = (buffer + data).split(b"\n")
        if len(buffer) > _LINE_BYTES:
            _kill(worker)
            return
        for line in found:
            yield line
            deadline = time.monotonic() + most_s


def _parsed(line: bytes, running: str | None) -> tuple[str, Any]:
    """Return an answer's kind and what it holds, as the worker writes it; a function may have written there, too."""
    try:
        ((kind, answer),) = json.loads(line).items()
        if kind in ("begins", "error") and running is None and isinstance(answer, str):
            return kind, answer
        made = Whole(**answer) if kind == "whole" == running else Result(**answer) if kind == "result" else None
        is_typed = made is not None and all(isinstance(getattr(made, name), kinds) for name, kinds in _kinds(made))
        if is_typed and answer.get("step", running) == running:
            return kind, answer
    except (AttributeError, RecursionError, TypeError, ValueError):
        pass
    raise _StoppedError(running, ("ended", "writes to a descriptor that it did not open; a step returns a result"))


def _kinds(made: Result | Whole) -> Iterator[tuple[str, type | tuple[type, ...]]]:
    """Yield the fields of an answer, and what they hold."""
    for field in fields(made):
        yield field.name, {"place": dict}.get(field.name, (int, float) if field.type in (float, "float") else str)


def _why(code: int, running: str | None, limit_s: float, said: str) -> tuple[str, str]:
    """Return a status and words for a process that did not finish; `said` is the last that it said."""
    if running is None:
        raise InputError(f"the model could not be loaded for a check: {said or f'exit code {code}'}")
    if code in (-signal.SIGKILL, -signal.SIGXCPU):
        return "time", f"does not end within {limit_s:g} s"
    if code < 0:
        return "ended", f"crashes the process ({signal.Signals(-code).name})"
    if code == 1 and said:
        return "ended", f"disturbs the check itself: {escape(said)}"
    return "ended", f"ends the process (exit code {code}); a step returns a result"


def _failed(running: str | None, why: tuple[str, str]) -> tuple[str, dict[str, Any]]:
    """Return the answer of a process that gave none."""
    status, words = why
    if running is None:
        raise InputError(f"the check ended before it began: {words}")
    if running == "whole":
        return running, asdict(Whole(error=words))
    return running, asdict(Result(running, status, words, section=step_named(running).section))


def _code(worker: "subprocess.Popen[str]") -> int:
    """Return the exit code of a process that has closed its answers; end it if it goes on."""
    try:
        return worker.wait(5)
    except subprocess.TimeoutExpired:
        _kill(worker)
        return worker.returncode


def _kill(worker: "subprocess.Popen[str]") -> None:
    """End the process, and what it started, which may have outlived it."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()
    if worker.stdin is not None:
        with suppress(OSError):
            worker.stdin.close()
