"""Build a Llama yourself: steps to write, and checks that run them inside a real model.

from pathlib import Path
from llamarium.build import start, check_folder, hint

start(Path("my_llama"))
for result in check_folder(Path("my_llama"), "rotate"):
    print(result)
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llamarium.build.check import Result
from llamarium.build.folder import Course, keep, progress, solution, start, step_named
from llamarium.build.process import LIMIT_S, check_in_process
from llamarium.build.step import Step
from llamarium.build.steps import STEPS
from llamarium.errors import InputError, escape
from llamarium.hub.own_folders import COURSE, note

__all__ = ["STEPS", "Course", "Result", "check_folder", "hint", "start"]


def check_folder(
    folder: Path, step: str | None = None, *, every: bool = False, seed: int = 0, limit_s: float = LIMIT_S
) -> Iterator[Result | dict[str, Any]]:
    """Check a learner's folder in a process of its own, and keep the progress in it.

    Args:
        folder: The folder, whose code is run.
        step: A step's name or number; None is the first that has not been right yet, or the last.
        every: Check all steps of the course instead, and the whole model if all of the steps are right.
        seed: Of sentences, shapes and numbers.
        limit_s: How long the check of one step may compute.

    Yields:
        A `Result` for each step; last, for a whole model, what `whole.whole` returns.

    Raises:
        InputError: If it is no learner's folder, or the model cannot be loaded.
        UnknownNameError: If there is no such step.
    """
    if not (folder / COURSE).is_file():
        raise InputError(f"{escape(folder)} is no folder of `llamarium build`; name one with --folder, or run it")
    course = Course.read(folder / COURSE)
    note(folder)
    steps = course.steps if every else (_chosen(folder, course, step),)
    results: list[Result] = []
    for result in check_in_process(folder, steps, model=course.model, texts=course.texts, seed=seed, limit_s=limit_s):
        assert isinstance(result, Result)
        results.append(result)
        try:
            yield result
        finally:
            keep(folder, [result])
    if every and len(results) == len(STEPS) and all(result.passed for result in results):
        yield from check_in_process(
            folder, (), model=course.model, texts=course.texts, seed=seed, whole=True, limit_s=limit_s
        )


def hint(folder: Path, step: str, depth: int | None = None) -> tuple[int, str]:
    """Return the hints of a step up to a depth, and note in the folder how many were read.

    Args:
        folder: The learner's folder.
        step: A step's name or number.
        depth: 1, 2, or 3 for the solution; None is one more than was read.

    Returns:
        The depth, and the text.
    """
    found = step_named(step)
    if not (folder / COURSE).is_file():
        raise InputError(f"{escape(folder)} is no folder of `llamarium build`; name one with --folder, or run it")
    depth = depth or min(3, progress(folder).get(found.name, {}).get("hints", 0) + 1)
    keep(folder, hints={found.name: depth})
    return depth, "\n\n".join(hints_of(found, depth))


def hints_of(step: Step, depth: int) -> tuple[str, ...]:
    """Return the first hints of a step; the third is the solution."""
    return (*step.hints, solution(step))[:depth]


def _chosen(folder: Path, course: Course, step: str | None) -> str:
    if step is not None:
        name = step_named(step).name
        if name not in course.steps:
            raise InputError(
                f"the course of {escape(folder)} has no step {escape(step)}; it has {', '.join(course.steps)}"
            )
        return name
    reached = progress(folder)
    return next((name for name in course.steps if not reached.get(name, {}).get("passed")), course.steps[-1])
