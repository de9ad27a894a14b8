"""Build a Llama yourself: functions to write step by step, and checks that run them inside a real model.

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
    """Check one step of a learner's folder in a separate process, and save the progress in the folder.

    Args:
        folder: The learner's folder; its code is executed.
        step: Name or number of the step. None is the first one that has not passed yet, or the last one.
        seed: Seed for sentences, shapes and numbers.
        limit_s: Maximum CPU time of one call of the function, in seconds.

    Returns:
        The result of the check.

    Raises:
        InputError: If `folder` is not a learner's folder, the course lacks the step, or the course's model or texts
            cannot be used.
        UnknownNameError: If the step does not exist.
        OptionError: On Windows, which lacks the process limits that checks need.
    """
    course = _course(folder)
    (result,) = _checked(folder, (_chosen(folder, course, step),), seed, limit_s)
    return result


def check_steps(folder: Path, *, seed: int = 0, limit_s: float = CALL_S) -> Iterator[Result]:
    """Check all steps of the course, and yield each result after its progress is saved.

    Arguments and errors as for `check_step`.
    """
    course = _course(folder)
    return _checked(folder, course.steps, seed, limit_s)


def check_whole(folder: Path, *, limit_s: float = CALL_S) -> Whole:
    """Run a whole model made of the folder's functions, and compare it with the library.

    Arguments and errors as for `check_step`.
    """
    _course(folder)
    trust(folder)
    return whole_in_process(folder, limit_s=limit_s)


def _checked(folder: Path, steps: Sequence[str], seed: int, limit_s: float) -> Iterator[Result]:
    trust(folder)
    for result in check_in_process(folder, steps, seed=seed, limit_s=limit_s):
        try:
            keep(folder, result)
        except OSError as error:  # the result is more important than saving the progress
            warn_caller(f"cannot save progress in {escape(folder)} ({escape(error)})")
        yield result


def _course(folder: Path) -> Course:
    """Return the course of a folder; OptionError on platforms where checks cannot run."""
    if sys.platform == "win32":
        raise OptionError("checks need process limits that Windows does not have; use Linux or macOS")
    return course_of(folder)


def hint(folder: Path, step: str, depth: int | None = None) -> tuple[int, str]:
    """Return hints for a step, and save in the folder how many were read.

    Args:
        folder: The learner's folder.
        step: Name or number of the step.
        depth: Number of hints: 1, 2, or 3 with the solution. None is one more than were read so far.

    Returns:
        The depth, and the hints up to it.
    """
    found_step = step_named(step)
    course_of(folder)
    depth = depth or min(3, progress(folder)[found_step.name].hints + 1)
    keep_hints(folder, found_step, depth)
    return depth, "\n\n".join(hints_of(found_step, depth))


def hints_of(step: Step, depth: int) -> tuple[str, ...]:
    """Return the first `depth` hints of a step; the third one is the solution."""
    return (*step.hints, solution(step))[:depth]


def next_step(folder: Path) -> str:
    """Return the name of the first step that has not passed yet, or of the last one."""
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
