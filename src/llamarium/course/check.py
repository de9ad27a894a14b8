"""Checking a learner's function: on random shapes, and inside a real model in place of the right one.

Each call inside the model is compared with what the right function returns of the same arguments, in float32; the
first place that parts is the answer, and what is often done wrong is recognised by its results.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from llamarium.course.arguments import ARGUMENTS, STEPS_OF_A_PASS, Source
from llamarium.course.calls import Call, Calls
from llamarium.course.compare import Difference, as_results, first_difference, given, plain, shape_problem, where
from llamarium.course.guard import LearnerError
from llamarium.course.learner import Learner
from llamarium.course.limits import LIMITS, Limits
from llamarium.course.pace import Pace
from llamarium.course.passes import KeysAndValues, Pass, watched
from llamarium.course.step import Function, own_state
from llamarium.course.steps import STEPS
from llamarium.errors import counted


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

    def __init__(self, status: str, words: str, difference: Difference | None, at: "_Place") -> None:
        self.status, self.words, self.difference, self.at = status, words, difference, at


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a call is made: on random numbers, or inside the model, there in a layer and a text."""

    inside: bool = False
    layer: int | None = None
    text: "_Text | None" = None

    @property
    def chain(self) -> tuple[int, int | None] | None:
        """The text and the layer."""
        return None if self.text is None else (self.text.name, self.layer)


class _EnoughError(Exception):
    """The time that a function may take inside the model is over; what was compared was right."""


@dataclass(slots=True)
class _Text:
    """A text that runs through the model part by part.

    Attributes:
        name: What the calls of it belong to.
        ids: Its tokens.
        past: Keys and values of those that have run.
        num_read: How many have run.
    """

    name: int
    ids: list[int]
    past: list[KeysAndValues]
    num_read: int = 0


def check_learner(source: Source, learner: Learner, *, seed: int = 0, limits: Limits = LIMITS) -> Result:
    """Check a learner's function against a model; LearnerError if it did anything but return a result.

    `seed` is of sentences, shapes and numbers.
    """
    try:
        return _Check(source, learner, seed, limits).result()
    except LearnerError as error:
        if error.kind == "changed":
            source.weights.forget()
        raise


class _Check:
    """One check of one function."""

    def __init__(self, source: Source, learner: Learner, seed: int, limits: Limits) -> None:
        self._source, self._step, self._learner, self._limits = source, learner.step, learner, limits
        self._rng = np.random.default_rng([seed, STEPS.index(self._step)])
        self._calls, self._pace = Calls(self._step), Pace(self._step.name)
        self._spent_s, self._num_calls = 0.0, 0
        self._slow = ""

    def result(self) -> Result:
        """Compare small random shapes, then the model's own numbers, then other shapes; report where it differs first.

        What a function does other than to return or to raise ends the check at once.
        """
        cases = [partial(self._compare, _Place(), *case) for case in self._step.cases(self._rng)]
        failures: list[tuple[_DiffersError | LearnerError, Call]] = []
        for tried in (cases[0], self._inside, *cases[1:]):
            try:
                tried()
            except (_DiffersError, LearnerError) as error:
                if isinstance(error, LearnerError) and error.kind != "raised":
                    raise
                failures.append((error, self._calls.last))
        return self._failed(failures) if failures else self._passed(len(cases))

    def _passed(self, num_cases: int) -> Result:
        inside = f"{counted(self._num_calls, 'call')} inside the model"
        slow = self._slow or (": it is slow" if self._pace.has_shortened else "")
        return Result(self._step.name, "passed", "is right", checked=f"{num_cases} random cases, {inside}{slow}")

    def _failed(self, failures: Sequence[tuple[_DiffersError | LearnerError, Call]]) -> Result:
        """Return the place that says most, and what was done wrong; LearnerError if it raised and no more is known."""
        first, call = failures[0]
        cause, section = self._calls.cause(self._learner, call)
        section = section or self._step.section
        differing = [error for error, _ in failures if isinstance(error, _DiffersError)]
        if isinstance(first, LearnerError):
            if not cause:
                raise first
            if not differing:
                return Result(self._step.name, first.kind, str(first), cause, section)
        inside = [error for error in differing if error.at.inside and error.difference is not None]
        error = (inside or differing)[0]
        return Result(self._step.name, error.status, error.words, cause, section, _described(error))

    def _compare(self, at: _Place, *args: Any) -> Any:
        """Call the function, compare its results with the right ones, and return these as the function would."""
        result = self._step.right(*own_state(args))
        right = as_results(result)
        self._calls.begin(args, right, at.chain)
        started = time.process_time()
        yours = as_results(self._learner(*own_state(args)))
        seconds = time.process_time() - started
        self._calls.end(yours)
        problem = shape_problem(self._step.outputs, yours, right)
        if problem is not None:
            raise _DiffersError("shape", problem, None, at)
        difference = first_difference(self._step.outputs, yours, right)
        if difference is not None:
            if at.text is not None and "T" in difference.at:
                difference.at["T"] += at.text.num_read
            words = where(difference, given(self._learner.names, args), at.layer, at.inside)
            raise _DiffersError("differs", words, difference, at)
        self._calls.was_right()
        if at.inside:
            self._pace.took(args, seconds)
            self._spend(seconds)
        return result

    def _spend(self, seconds: float) -> None:
        """Count a call inside the model; _EnoughError if there is no time for another one."""
        self._spent_s += seconds
        self._num_calls += 1
        if self._spent_s > self._limits.inside_s:
            raise _EnoughError

    def _inside(self) -> None:
        """Run it in the model's place, as long as it may compute."""
        reached = [""]
        try:
            if self._step in STEPS_OF_A_PASS:
                self._passes(reached)
            else:
                for args in ARGUMENTS[self._step.name](self._source, self._rng):
                    self._compare(_Place(inside=True), *args)
        except _EnoughError:
            self._slow = f"{reached[0]}: it is slow"

    def _passes(self, reached: list[str]) -> None:
        """Run texts through the model in turns: the beginning of each, then tokens one by one.

        So what a function keeps of one text, or of one layer, shows in another.
        """
        text = _Text(0, [], [])

        def watch(layer: int | None, right: Function, args: tuple[Any, ...]) -> Any:
            fitting = self._pace.fitting(args, self._limits.inside_s - self._spent_s)
            result = self._compare(_Place(True, layer, text), *fitting)
            reached[0] = "" if layer is None else f", down to layer {layer}"
            return result if fitting is args else right(*args)

        running = Pass(self._source.weights, watched(self._step.name, lambda: running, watch))
        texts = [_Text(name, ids, running.empty()) for name, ids in enumerate(self._source.prompts(self._rng))]
        for name, end in _TURNS:
            text = texts[name]
            part = np.array(text.ids[text.num_read : end])
            if self._step.name == "embed":  # which is the begin of a pass: the rest takes a second
                running.embed(part)
            else:
                run = running.logits if self._step.name == "head" else running.hidden
                _, text.past = run(part, text.past)
            text.num_read += len(part)


_TURNS = (0, -2), (1, -2), (0, -1), (1, None), (2, -1), (0, None), (2, None)
"""Which text runs, and up to which token."""


def _described(error: _DiffersError) -> dict[str, Any]:
    """Return the place of a difference as a result has it."""
    if error.difference is None:
        return {}
    place: dict[str, Any] = {"inside": error.at.inside, "layer": error.at.layer, **error.difference.at}
    place["output"] = error.difference.output
    if error.at.text is not None:
        place["ids"] = error.at.text.ids
    return place | {"yours": plain(error.difference.yours), "right": plain(error.difference.right)}
