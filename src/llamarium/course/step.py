"""A step of the course. Torch-free.

A step's right function has several uses: its signature and docstring make the file that a learner completes, its source
is the last hint, and its results are compared with those of the learner's function. Tests compare these functions with
the library's forward pass.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np

Function = Callable[..., Any]
Arguments = tuple[Any, ...]


@runtime_checkable
class Stateful(Protocol):
    """An argument with state, e.g. a function that samples with random numbers."""

    def anew(self) -> Self:
        """Return the argument in its initial state."""
        ...


def own_state(args: Arguments) -> Arguments:
    """Return arguments for another call, with stateful ones reset to their initial state."""
    return tuple(arg.anew() if isinstance(arg, Stateful) else arg for arg in args)


def something_is_kept(args: Arguments, yours: tuple[Any, ...] | None, right: tuple[Any, ...]) -> str:
    """Return the default cause for a result that is wrong because of an earlier call."""
    del args, yours, right
    return (
        "Something of an earlier call is used again, from a global, a cache, a class or a default argument: alone, "
        "this call is right. Compute from the arguments only."
    )


@dataclass(frozen=True, slots=True)
class Mistake:
    """A common mistake.

    Attributes:
        cause: The mistake in one sentence.
        wrong: The step's function with this mistake; a learner's function with the same results has made it.
        section: The course's section that explains it; "" is the step's section.
    """

    cause: str
    wrong: Function
    section: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """One function that a learner writes.

    Attributes:
        right: The right function. Arrays are NumPy arrays of float32.
        title: Title of the step.
        about: Text above the function that explains its purpose.
        section: The course's section that explains it: a chapter's file name without `.md`, `#`, and a heading.
        stage: Id of the stage on the page where the step is shown.
        outputs: Name and axes of each returned array, e.g. `q TNH`; "" for a result that is not an array.
        hints: Two hints; the third one is the solution.
        cases: Returns arguments of small random shapes that reveal the mistakes.
        mistakes: Common mistakes.
        cause_of_keeping: Returns the cause for a result that is wrong because of an earlier call, from the arguments,
            the learner's results (None if the function raised) and the right ones.
    """

    right: Function
    title: str
    about: str
    section: str
    stage: str
    outputs: tuple[str, ...]
    hints: tuple[str, str]
    cases: Callable[[np.random.Generator], Iterable[Arguments]]
    mistakes: tuple[Mistake, ...]
    cause_of_keeping: Callable[[Arguments, tuple[Any, ...] | None, tuple[Any, ...]], str] = something_is_kept

    @property
    def name(self) -> str:
        """Name of the step, which is the function's name."""
        return self.right.__name__
