"""The process that checks learners' functions: `python -m llamarium.course.worker FOLDER STEPS CONNECTION PLACE`.

It receives one step at a time over the connection, and marks in the file PLACE while it computes. Printed output is
captured. This process limits its memory, and the parent limits its time.
"""

import faulthandler
import fcntl
import io
import os
import resource
import socket
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import llamarium
from llamarium.course.arguments import Source
from llamarium.course.check import Result, check_learner
from llamarium.course.guard import LearnerError
from llamarium.course.learner import Learner
from llamarium.course.limits import Limits
from llamarium.course.outline import Course, course_of, file_of, step_named
from llamarium.course.passes import Weights
from llamarium.course.whole import Whole, whole
from llamarium.errors import LlamariumError
from llamarium.runtime.process.frames import read_header, send

MEMORY_BYTES = 2 << 30
"""Memory limit of a learner's function, in addition to the model."""

PRINTED_CHARS = 2000


def main(folder: str, steps: str, connection: str, place: str) -> int:
    """Check steps on request; return the exit code."""
    return serve(connection, lambda channel: _checking(Path(folder), steps.split(","), channel, int(place)))


def serve(connection: str, begin: Callable[[socket.socket], Callable[[dict[str, Any], list[int]], None]]) -> int:
    """Answer requests until the connection is closed, and return the exit code.

    Args:
        connection: Descriptor of the socket.
        begin: Returns a function that answers a request, from its header and file descriptors. A LlamariumError is
            sent to the other side.
    """
    end_with_parent()
    with socket.socket(fileno=int(connection)) as channel:
        try:
            answer = begin(channel)
        except LlamariumError as error:
            send(channel, {"error": str(error)})
            return 1
        send(channel, {"begins": True})
        while True:
            begun, descriptors, _, _ = socket.recv_fds(channel, 4, 1)
            if not begun:
                return 0
            answer(read_header(channel, start=begun), descriptors)


def _checking(
    folder: Path, steps: Sequence[str], channel: socket.socket, place: int
) -> Callable[[dict[str, Any], list[int]], None]:
    course = course_of(folder)
    source = _loaded(course, steps)
    bound_memory(600 << 20)  # for the model's weights in float32, which are read later
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))  # stderr is a file
    os.chdir(folder)
    sys.dont_write_bytecode = True

    def answer(asked: dict[str, Any], _: list[int]) -> None:
        name, limits = asked["step"], Limits(asked["limit_s"], kills=True)
        os.pwrite(place, (0).to_bytes(8, "little"), 0)
        if name == "whole":
            result = _whole(course.model, source, folder, limits)
        else:
            result = _check(source, folder, name, asked["seed"], limits)
        os.pwrite(place, (-1).to_bytes(8, "little", signed=True), 0)
        send(channel, {"found": asdict(result)})

    return answer


def _loaded(course: Course, steps: Sequence[str]) -> Source:
    """Load the model and encode the texts first, so that their errors are not reported as a function's."""
    llama = llamarium.load(course.model)
    source = Source(Weights(llama.config, llama.runner.dequantize), llama.tokenizer, course.texts)
    if "whole" in steps or "merge" in steps:
        source.vocabulary()
    return source


def _check(source: Source, folder: Path, name: str, seed: int, limits: Limits) -> Result:
    """Check one step; failures of the learner's code become results."""
    step, started = step_named(name), time.perf_counter()
    with _printed() as printed:
        try:
            learner = Learner(step, folder / file_of(step), limits)
            result = check_learner(source, learner, seed=seed, limits=limits)
        except LearnerError as error:
            result = Result(name, error.kind, str(error), section=step.section)
    return replace(result, printed=printed.getvalue(), seconds=round(time.perf_counter() - started, 3))


def _whole(model: str, source: Source, folder: Path, limits: Limits) -> Whole:
    with _printed():
        try:
            return whole(llamarium.load(model, dtype="float32"), source, folder, limits)
        except LearnerError as error:
            return Whole(error=str(error))


class _Bounded(io.StringIO):
    """A text buffer that keeps only the first `PRINTED_CHARS` characters."""

    def write(self, text: str, /) -> int:
        super().write(text[: max(0, PRINTED_CHARS - self.tell())])
        return len(text)


@contextmanager
def _printed() -> Generator[io.StringIO]:
    printed = _Bounded()
    with redirect_stdout(printed), redirect_stderr(printed):
        yield printed


def end_with_parent() -> None:
    """Let the system kill this process when its parent ends, even during long computations; dump a trace on a crash."""
    faulthandler.enable(2, all_threads=False)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)


def bound_memory(more_bytes: int) -> None:
    """Limit the memory of this process to its current size plus `MEMORY_BYTES` plus `more_bytes`.

    This needs /proc, so memory is not limited on macOS.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
        used = int(next(line for line in status.splitlines() if line.startswith("VmData:")).split()[1]) << 10
    except OSError:
        return
    limit = used + MEMORY_BYTES + more_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
