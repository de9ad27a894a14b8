"""The process in which learners' functions run: `python -m llamarium.build.worker`.

It reads one line of JSON, what is to be done, and answers in lines of JSON on the descriptor that it was given. What a
function prints is kept; the memory that it may take is bounded, and the parent bounds its time.
"""

import faulthandler
import fcntl
import io
import json
import math
import os
import resource
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import llamarium
from llamarium.build.arguments import Source
from llamarium.build.check import BUDGET_S, Result, check_learner
from llamarium.build.folder.course import file_of, step_named
from llamarium.build.guard import LearnerError
from llamarium.build.learner import Learner
from llamarium.build.passes import Weights
from llamarium.build.whole import Whole, whole
from llamarium.errors import LlamariumError

MEMORY_BYTES = 2 << 30
"""What a learner's function may take, beside the model."""

PRINTED_CHARS = 2000


def main() -> int:
    """Check the steps that are asked for, one line each."""
    asked = json.loads(sys.stdin.readline())
    end_with_parent()
    with os.fdopen(asked["descriptor"], "w", encoding="utf-8", buffering=1) as answers:
        try:
            source = _loaded(asked)
        except LlamariumError as error:
            answers.write(json.dumps({"error": str(error)}) + "\n")
            return 1
        folder = Path(asked["folder"])
        bound_memory(600 << 20)  # the model's weights as float32 come yet
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))  # what it says on stderr lies in a file
        os.chdir(folder)
        sys.dont_write_bytecode = True
        for name in asked["steps"]:
            _bound_time(asked["limit_s"])
            answers.write(json.dumps({"begins": name}) + "\n")
            answers.write(json.dumps({"result": asdict(_check(source, folder, name, asked["seed"]))}) + "\n")
        if asked["whole"]:
            _bound_time(3 * asked["limit_s"])
            answers.write(json.dumps({"begins": "whole"}) + "\n")
            answers.write(json.dumps({"whole": asdict(_whole(asked["model"], source, folder))}) + "\n")
    return 0


def _loaded(asked: dict[str, Any]) -> Source:
    """Load the model and read the texts, so that what is wrong with these is not said of a function."""
    llama = llamarium.load(asked["model"])
    source = Source(Weights(llama.config, llama.runner.dequantize), llama.tokenizer, asked["texts"])
    if asked["whole"] or "merge" in asked["steps"]:
        source.vocabulary()
    return source


def _check(source: Source, folder: Path, name: str, seed: int, budget_s: float = BUDGET_S) -> Result:
    """Check one step; whatever the learner's code does but return becomes words."""
    step, started = step_named(name), time.perf_counter()
    with _printed() as printed:
        try:
            result = check_learner(source, Learner(step, folder / file_of(step)), seed=seed, budget_s=budget_s)
        except LearnerError as error:
            result = Result(name, error.kind, str(error), section=step.section)
    return replace(result, printed=printed.getvalue(), seconds=round(time.perf_counter() - started, 3))


def _whole(model: str, source: Source, folder: Path) -> Whole:
    with _printed():
        try:
            return whole(llamarium.load(model, dtype="float32"), source, folder)
        except LearnerError as error:
            return Whole(error=str(error))


class _Bounded(io.StringIO):
    """Text of which the beginning is kept."""

    def write(self, text: str, /) -> int:
        super().write(text[: max(0, PRINTED_CHARS - self.tell())])
        return len(text)


@contextmanager
def _printed() -> Generator[io.StringIO]:
    printed = _Bounded()
    with redirect_stdout(printed), redirect_stderr(printed):
        yield printed


def _bound_time(limit_s: float) -> None:
    """Let this process compute for so long from now on; then it is ended (SIGXCPU)."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(usage.ru_utime + usage.ru_stime + limit_s)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def end_with_parent() -> None:
    """Be ended by the system when the parent is, whatever runs here then; say where it was when it is aborted."""
    faulthandler.enable(2, all_threads=False)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)


def bound_memory(more_bytes: int) -> None:
    """Bound the memory of this process by what it has, `MEMORY_BYTES` and so many more.

    Only Linux says what it has (/proc); on macOS memory is not bounded, and time alone is.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
        used = int(next(line for line in status.splitlines() if line.startswith("VmData:")).split()[1]) << 10
    except OSError:
        return
    limit = used + MEMORY_BYTES + more_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


if __name__ == "__main__":
    sys.exit(main())
