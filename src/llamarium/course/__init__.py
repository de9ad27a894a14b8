"""Build a Llama yourself: steps to write, and checks that run them inside a real model.

from pathlib import Path
from llamarium.course import check_step, hint, start

start(Path("my_llama"))
print(check_step(Path("my_llama"), "rotate"))
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from llamarium.course.check import Result
from llamarium.course.folder.progress import keep, keep_hints, progress
from llamarium.course.folder.source import solution, start
from llamarium.course.limits import CALL_S
from llamarium.course.outline import Course, course_of, step_named
from llamarium.course.process import check_in_process, whole_in_process
from llamarium.course.step import Step
from llamarium.course.steps import STEPS
from llamarium.course.whole import Whole
from llamarium.errors import InputError, OptionError, escape, warn_caller
from llamarium.hub.folders import trust

__all__ = [
    "STEPS",
    "Course",
    "Result",
    "Whole",
    "check_step",
    "check_steps",
    "check_whole",
    "hint",
    "next_step",
    "start",
]


def check_step(folder: Path, step: str | None = None, *, seed: int = 0, limit_s: float = CALL_S) -> Result:
    """Check one step of a learner's folder in a process of its own, and keep the progress in the folder.

    Args:
        folder: The folder, whose code is run.
        step: A step's name or number; None is the first that has not been right yet, or the last.
        seed: Of sentences, shapes and numbers.
        limit_s: Processor time that one call of the function may take.

    Raises:
        InputError: If it is no learner's folder, the course lacks the step, or its model or texts cannot be used.
        UnknownNameError: If there is no such step.
        OptionError: On Windows.
    """
    course = _course(folder)
    (result,) = _checked(folder, (_chosen(folder, course, step),), seed, limit_s)
    return result


def check_steps(folder: Path, *, seed: int = 0, limit_s: float = CALL_S) -> Iterator[Result]:
    """Yield what the check of each step of the course finds, once it is kept; arguments and errors of `check_step`."""
    course = _course(folder)
    return _checked(folder, course.steps, seed, limit_s)


def check_whole(folder: Path, *, limit_s: float = CALL_S) -> Whole:
    """Compare all functions of a folder together with the library; arguments and errors of `check_step`."""
    _course(folder)
    trust(folder)
    return whole_in_process(folder, limit_s=limit_s)


def _checked(folder: Path, steps: Sequence[str], seed: int, limit_s: float) -> Iterator[Result]:
    trust(folder)
    for result in check_in_process(folder, steps, seed=seed, limit_s=limit_s):
        try:
            keep(folder, result)
        except OSError as error:  # what was found is worth more than its note
            warn_caller(f"cannot save progress in {escape(folder)} ({escape(error)})")
        yield result


def _course(folder: Path) -> Course:
    """Return the course of a folder whose code can be run here."""
    if sys.platform == "win32":
        raise OptionError("checks need process limits that Windows does not have; use Linux or macOS")
    return course_of(folder)


def hint(folder: Path, step: str, depth: int | None = None) -> tuple[int, str]:
    """Return a depth and the hints of a step, by name or number, up to it, and note in the folder how many were read.

    The depth is 1, 2, or 3 for the solution; None is one more than was read.
    """
    found = step_named(step)
    course_of(folder)
    depth = depth or min(3, progress(folder)[found.name].hints + 1)
    keep_hints(folder, found, depth)
    return depth, "\n\n".join(hints_of(found, depth))


def hints_of(step: Step, depth: int) -> tuple[str, ...]:
    """Return the first hints of a step; the third is the solution."""
    return (*step.hints, solution(step))[:depth]


def next_step(folder: Path) -> str:
    """Return the name of the first step that is open, or of the last one."""
    return _chosen(folder, course_of(folder), None)


def _chosen(folder: Path, course: Course, step: str | None) -> str:
    if step is not None:
        name = step_named(step).name
        if name not in course.steps:
            raise InputError(
                f"the course of {escape(folder)} has no step {escape(step)}; it has {', '.join(course.steps)}"
            )
        return name
    reached = progress(folder)
    return next((name for name in course.steps if not reached[name].is_right), course.steps[-1])
