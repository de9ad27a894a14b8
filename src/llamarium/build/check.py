"""Checking a learner's function: on random shapes, and inside a real model in place of the right one.

Each call inside the model is compared with what the right function returns of the same arguments, in float32; the
first place that parts is the answer, and what is often done wrong is recognised by its results.
"""

import signal
import time
import warnings
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from llamarium.build.arguments import ARGUMENTS, STEPS_OF_A_PASS, Source
from llamarium.build.compare import Difference, as_results, first_difference, given, plain, same, shape_problem, where
from llamarium.build.guard import LearnerError
from llamarium.build.learner import Learner
from llamarium.build.passes import Pass, watched
from llamarium.build.step import Mistake
from llamarium.build.steps import STEPS

BUDGET_S = 4.0
"""How long a learner's function may compute inside the model; what was not reached by then is said."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a check found.

    Attributes:
        step: The step's name.
        status: "passed", or what was wrong: "differs", "shape", "raised", "empty", "missing", "changed", "files",
            "memory", "time", "ended".
        message: One sentence about it.
        cause: What is often done wrong and was done here, or "".
        section: Where the course explains it.
        place: Where the first number differs: "layer", its index by axis ("T" a position of the text), the "output",
            "yours" and "right"; inside a pass the "ids" that ran. Empty if none does.
        printed: What the function printed.
        checked: On what it was checked, if it passed.
        seconds: How long the check took.
    """

    step: str
    status: str
    message: str
    cause: str = ""
    section: str = ""
    place: dict[str, Any] = field(default_factory=dict)
    printed: str = ""
    checked: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether nothing was wrong."""
        return self.status == "passed"


class _DiffersError(Exception):
    """A result is not the right one: why in words, and where."""

    def __init__(self, status: str, words: str, difference: Difference | None, layer: int | None, inside: bool) -> None:
        self.status, self.words, self.difference, self.layer, self.inside = status, words, difference, layer, inside


class _EnoughError(BaseException):
    """The time that a function may take inside the model is over; what was compared was right."""


def check_learner(source: Source, learner: Learner, *, seed: int = 0, budget_s: float = BUDGET_S) -> Result:
    """Check a learner's function against a model; LearnerError if it did anything but return a result.

    `seed` is of sentences, shapes and numbers; the function may compute for `budget_s` inside the model.
    """
    try:
        return _Check(source, learner, seed, budget_s).result()
    except LearnerError as error:
        if error.kind == "changed":
            source.weights.forget()
        raise


class _Check:
    """One check of one function."""

    def __init__(self, source: Source, learner: Learner, seed: int, budget_s: float) -> None:
        self._source, self._step, self._learner, self._budget_s = source, learner.step, learner, budget_s
        self._rng = np.random.default_rng([seed, STEPS.index(self._step)])
        self._calls: list[tuple[tuple[Any, ...], tuple[Any, ...]]] = []
        self._spent_s, self._num_calls = 0.0, 0
        self._slow = ""
        self._ids: list[int] = []
        self._start = 0

    def result(self) -> Result:
        """Compare small random shapes, then the model's own numbers, then other shapes; report where it differs first.

        What a function does other than to return or to raise ends the check at once.
        """
        cases = [partial(self._compare, None, *case) for case in self._step.cases(self._rng)]
        found: list[_DiffersError | LearnerError] = []
        for tried in (cases[0], self._inside, *cases[1:]):
            try:
                tried()
            except (_DiffersError, LearnerError) as error:
                if isinstance(error, LearnerError) and error.kind != "raised":
                    raise
                found.append(error)
        if not found:
            inside = f"{self._num_calls} call{'' if self._num_calls == 1 else 's'} inside the model"
            return Result(
                self._step.name, "passed", "is right", checked=f"{len(cases)} random cases, {inside}{self._slow}"
            )
        parts = [error for error in found if isinstance(error, _DiffersError)]
        cause = next(filter(self._was_made, self._step.mistakes), None) if parts else None
        if isinstance(found[0], LearnerError) and cause is None:
            raise found[0]
        inside = [error for error in parts if error.inside and error.difference is not None]
        return self._failed((inside or parts)[0], cause)

    def _compare(self, layer: int | None, *args: Any, inside: bool = False) -> Any:
        """Call the function, compare its results with the right ones, and return these as the function would."""
        result = self._step.right(*args)
        right = as_results(result)
        started = time.process_time()
        with _within(self._budget_s - self._spent_s) if inside else nullcontext():
            yours = as_results(self._learner(*args))
        self._calls.append((args, yours))
        problem = shape_problem(self._step.outputs, yours, right)
        if problem is not None:
            raise _DiffersError("shape", problem, None, layer, inside)
        difference = first_difference(self._step.outputs, yours, right)
        if difference is not None:
            if inside and "T" in difference.at:
                difference.at["T"] += self._start
            words = where(difference, given(self._learner.names, args), layer, inside)
            raise _DiffersError("differs", words, difference, layer, inside)
        if inside:
            self._spent_s += time.process_time() - started
            self._num_calls += 1
        return result

    def _inside(self) -> None:
        """Run it in the model's place, as long as it may compute."""
        reached = [""]
        try:
            if self._step in STEPS_OF_A_PASS:
                self._passes(reached)
            else:
                for args in ARGUMENTS[self._step.name](self._source, self._rng):
                    self._compare(None, *args, inside=True)
        except _EnoughError:
            if self._spent_s < self._budget_s / 2:  # so this one call took longer than all before it
                words = f"does not return within {self._budget_s / 2:g} s inside the model"
                raise LearnerError("time", words) from None
            self._slow = f"{reached[0]}: it is slow"

    def _passes(self, reached: list[str]) -> None:
        """Run sentences through the model: the prompt, then two tokens one by one."""

        def watch(layer: int | None, _right: Any, args: tuple[Any, ...]) -> Any:
            right = self._compare(layer, *args, inside=True)
            reached[0] = "" if layer is None else f", down to layer {layer}"
            return right

        running = Pass(self._source.weights, watched(self._step.name, lambda: running, watch))
        for ids in self._source.sentences(self._rng):
            past, self._ids, self._start = running.empty(), ids, 0
            for part in (ids[:-2], ids[-2:-1], ids[-1:]):
                if self._step.name == "embed":  # which is the begin of a pass: the rest takes a second
                    running.embed(np.array(part))
                else:
                    _, past = running.logits(np.array(part), past)
                self._start += len(part)
            self._calls = self._calls[:64]  # enough to tell the mistakes apart

    def _failed(self, error: _DiffersError, cause: Mistake | None) -> Result:
        place: dict[str, Any] = {}
        if error.difference is not None:
            found = error.difference
            place = {"inside": error.inside, "layer": error.layer, **found.at, "output": found.output}
            if error.inside and self._ids:
                place["ids"] = self._ids
            place |= {"yours": plain(found.yours), "right": plain(found.right)}
        words, section = ("", "") if cause is None else (cause.cause, cause.section)
        return Result(self._step.name, error.status, error.words, words, section or self._step.section, place)

    def _was_made(self, mistake: Mistake) -> bool:
        """Return whether a mistake's results are the learner's in all calls."""
        try:
            with warnings.catch_warnings(action="ignore"):
                return all(
                    same(self._step.outputs, yours, as_results(mistake.wrong(*args))) for args, yours in self._calls
                )
        except Exception:  # noqa: BLE001 - a mistake may fail where shapes do not fit it
            return False


@contextmanager
def _within(seconds: float) -> Generator[None]:
    """Raise _EnoughError where the code inside computes for longer."""

    def stop(*_: object) -> None:
        raise _EnoughError

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
