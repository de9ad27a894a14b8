"""Checks a learner's function, on random shapes and inside a real model in place of the right function.

Each call is compared with the right function on the same arguments, in float32. The check reports the first difference,
and recognizes common mistakes by their results.
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
    """The result of a check.

    Attributes:
        step: Name of the step.
        status: "passed", or the kind of failure: "differs", "shape", "raised", "empty", "missing", "changed", "files",
            "memory", "time", "ended".
        message: The result in one sentence.
        cause: The recognized mistake, or "".
        section: The course's section that explains it.
        place: The first difference: "inside" the model or not, "layer", index by axis ("T" is a position in the text),
            "output", "yours" and "right"; in a forward pass also the "ids" of the text. Empty if there is none.
        printed: Output that the function printed.
        checked: What was checked, if the step passed.
        seconds: Duration of the check.
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
        """Whether the step passed."""
        return self.status == "passed"


class _DiffersError(Exception):
    """A result that is not right.

    Attributes:
        status: As `Result.status`.
        words: What differs.
        difference: The first different number, or None for a wrong shape.
        at: The call.
    """

    def __init__(self, status: str, words: str, difference: Difference | None, at: "_Place") -> None:
        self.status, self.words, self.difference, self.at = status, words, difference, at


@dataclass(frozen=True, slots=True)
class _Place:
    """The context of a call: random numbers, or a layer and a text inside the model."""

    inside: bool = False
    layer: int | None = None
    text: "_Text | None" = None

    @property
    def chain(self) -> tuple[int, int | None] | None:
        """Text and layer, as in `Call.chain`."""
        return None if self.text is None else (self.text.name, self.layer)


class _EnoughError(Exception):
    """Stops a check inside the model when its CPU time is used up; all compared results were right."""


@dataclass(slots=True)
class _Text:
    """A text that runs through the model in parts.

    Attributes:
        name: Number of the text, for `Call.chain`.
        ids: Token ids.
        past: KV cache of the tokens that have run, by layer.
        num_read: Number of tokens that have run.
    """

    name: int
    ids: list[int]
    past: list[KeysAndValues]
    num_read: int = 0


def check_learner(source: Source, learner: Learner, *, seed: int = 0, limits: Limits = LIMITS) -> Result:
    """Check a learner's function inside a model.

    Args:
        source: The model and texts.
        learner: The learner's function.
        seed: Seed for sentences, shapes and numbers.
        limits: Limits of CPU time.

    Raises:
        LearnerError: If the function did anything other than return a result, e.g. raise an error for an unknown
            reason or change its arguments.
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
        """Compare on a small random case, inside the model, then on the other random cases, and return the result.

        Anything that a function does other than return or raise ends the check immediately.
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
        """Return the most informative failure, inside the model if possible, and its cause.

        Raises:
            LearnerError: If the function first raised an error and the cause is unknown.
        """
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
        """Call the learner's function, compare its results with the right ones, and return the right ones."""
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
        """Count a call inside the model; _EnoughError if the CPU time is used up."""
        self._spent_s += seconds
        self._num_calls += 1
        if self._spent_s > self._limits.inside_s:
            raise _EnoughError

    def _inside(self) -> None:
        """Run the function inside the model, within the limit of CPU time."""
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
        """Run texts through the model alternately: first a prefill of each, then single tokens.

        A function that keeps state of one text or layer then fails in another one.
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
            if self._step.name == "embed":  # only the start of the pass is needed; the rest takes a second
                running.embed(part)
            else:
                run = running.logits if self._step.name == "head" else running.hidden
                _, text.past = run(part, text.past)
            text.num_read += len(part)


_TURNS = (0, -2), (1, -2), (0, -1), (1, None), (2, -1), (0, None), (2, None)
"""Index of the text that runs, and the end of the tokens to run, in order."""


def _described(error: _DiffersError) -> dict[str, Any]:
    """Return a difference in the format of `Result.place`."""
    if error.difference is None:
        return {}
    place: dict[str, Any] = {"inside": error.at.inside, "layer": error.at.layer, **error.difference.at}
    place["output"] = error.difference.output
    if error.at.text is not None:
        place["ids"] = error.at.text.ids
    return place | {"yours": plain(error.difference.yours), "right": plain(error.difference.right)}
