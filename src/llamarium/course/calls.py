"""The compared calls of a learner's function, and the diagnosis of a function that failed.

A mistake is recognized by its results, which equal those of a known wrong function in every call. A function that keeps
state between calls is recognized by running the failed call in a fresh import, where it is right.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llamarium.course.compare import as_results, first_difference, same, shape_problem
from llamarium.course.guard import LearnerError
from llamarium.course.learner import Learner
from llamarium.course.step import Step, own_state

Arguments = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a learner's function.

    Attributes:
        args: Arguments.
        right: The right results.
        chain: Text and layer of a call inside the model, else None. Calls with the same chain are consecutive steps of
            one sequence.
        yours: The learner's results; None if the function raised.
        is_right: Whether these are right.
    """

    args: Arguments
    right: tuple[Any, ...]
    chain: tuple[int, int | None] | None = None
    yours: tuple[Any, ...] | None = None
    is_right: bool = False


class Calls:
    """The calls of one check, in order."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._all: list[Call] = []

    def begin(self, args: Arguments, right: Any, chain: tuple[int, int | None] | None) -> None:
        """Add a call before it is made."""
        self._all.append(Call(args, as_results(right), chain))

    def end(self, yours: tuple[Any, ...]) -> None:
        """Set the results of the last call; LearnerError if they overwrite those of the call before."""
        self._all[-1] = replace(self._all[-1], yours=yours)
        if len(self._all) > 1 and self._all[-2].is_right and _is_overwritten(self._step, self._all[-2], yours):
            words = "overwrites the array that it returned in the previous call; return a new array each time"
            raise LearnerError("changed", words)

    def was_right(self) -> None:
        """Mark the results of the last call as right."""
        self._all[-1] = replace(self._all[-1], is_right=True)

    @property
    def last(self) -> Call:
        """The last call."""
        return self._all[-1]

    def cause(self, learner: Learner, failed: Call) -> tuple[str, str]:
        """Return the cause of a failed call and the section that explains it, each "" if unknown.

        Args:
            learner: The learner's function.
            failed: The failed call.
        """
        returned = [call for call in self._all if call.yours is not None]
        for mistake in self._step.mistakes:
            if self._was_made(mistake.wrong):
                return mistake.cause, mistake.section
        if self._keeps_something(learner, failed):
            return self._step.cause_of_keeping(failed.args, failed.yours, failed.right), ""
        if failed.yours is None:
            return "", ""
        if self._is_random(learner, failed):
            return "Two calls with the same arguments return different results: remove the random numbers.", ""
        return self._of_precision(returned), ""

    def _was_made(self, wrong: Callable[..., Any]) -> bool:
        """Whether a mistake has the learner's results in all calls that returned.

        If all of these are right, the mistake must also raise where the learner's function does.
        """
        returned = [call for call in self._all if call.yours is not None]
        raised = [] if any(not call.is_right for call in returned) else [call for call in self._all if not call.yours]
        with warnings.catch_warnings(action="ignore"):
            return all(self._is_result_of(wrong, call) for call in (*returned, *raised))

    def _is_result_of(self, wrong: Callable[..., Any], call: Call) -> bool:
        try:
            results = _results(wrong, call.args)
        except Exception:  # noqa: BLE001 - a mistake may fail on some shapes
            return call.yours is None
        return call.yours is not None and same(self._step.outputs, call.yours, results)

    def _keeps_something(self, learner: Learner, failed: Call) -> bool:
        """Whether the call is right in a fresh import, alone or after the earlier calls of its layer or its text."""
        if self._is_right_anew(learner, [failed]):
            return True
        if failed.chain is None:
            return False
        place = next(place for place, call in enumerate(self._all) if call.args is failed.args)
        of_text = [call for call in self._all[:place] if call.chain is not None and call.chain[0] == failed.chain[0]]
        of_layer = [call for call in of_text if call.chain == failed.chain]
        return any(self._is_right_anew(learner, [*before, failed]) for before in (of_layer, of_text) if before)

    def _is_right_anew(self, learner: Learner, calls: Sequence[Call]) -> bool:
        try:
            function = learner.anew()
            yours = [_results(function, call.args) for call in calls][-1]
        except LearnerError:
            return False
        outputs, right = self._step.outputs, calls[-1].right
        return shape_problem(outputs, yours, right) is None and first_difference(outputs, yours, right) is None

    def _is_random(self, learner: Learner, failed: Call) -> bool:
        try:
            first, second = (_results(learner.anew(), failed.args) for _ in range(2))
        except LearnerError:
            return False
        has_shape = shape_problem(self._step.outputs, first, failed.right) is None
        return has_shape and not same(self._step.outputs, first, second)

    def _of_precision(self, returned: Sequence[Call]) -> str:
        """Return the cause if all results are almost right, as with a smaller dtype, else ""."""
        pairs: list[tuple[Any, Any]] = []
        for call in returned:
            assert call.yours is not None
            for output, mine, right in zip(self._step.outputs, call.yours, call.right, strict=False):
                if output and _are_arrays(mine) and mine.dtype.kind == "f" and mine.shape == right.shape:
                    pairs.append((np.asarray(mine, np.float32), right))
        if not pairs or not all(_is_near(mine, right) for mine, right in pairs):
            return ""
        for name, rounded in (("float16", _in_float16), ("bfloat16", _in_bfloat16)):
            if all(np.array_equal(rounded(mine), mine) for mine, _ in pairs):
                return f"The results are rounded to {name}; compute in float32."
        return (
            "All numbers are almost right, as if something were computed in float16; compute in float32, and check "
            "whether a small term is missing."
        )


def _results(function: Callable[..., Any], args: Arguments) -> tuple[Any, ...]:
    """Call a function, with stateful arguments reset to their initial state."""
    return as_results(function(*own_state(args)))


def _is_overwritten(step: Step, before: Call, yours: tuple[Any, ...]) -> bool:
    """Whether the results of an earlier right call share memory with these and are no longer right."""
    assert before.yours is not None
    pairs = [(old, new) for old in before.yours for new in yours if _are_arrays(old, new)]
    if not any(np.may_share_memory(old, new) for old, new in pairs):
        return False
    outputs, right = step.outputs, before.right
    return (
        shape_problem(outputs, before.yours, right) is not None
        or first_difference(outputs, before.yours, right) is not None
    )


def _are_arrays(*values: Any) -> bool:
    return all(isinstance(value, np.ndarray) for value in values)


def _is_near(mine: Any, right: Any) -> bool:
    """Whether two arrays are equal up to 1 % of each row's largest number."""
    size = np.abs(right).max(axis=-1, keepdims=True) if right.ndim and right.size else np.abs(right)
    return bool(np.isfinite(mine).all()) and bool((np.abs(mine - right) <= 1e-2 * np.maximum(size, 1e-12)).all())


def _in_float16(x: Any) -> Any:
    with np.errstate(over="ignore"):
        return x.astype(np.float16).astype(np.float32)


def _in_bfloat16(x: Any) -> Any:
    return (np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
