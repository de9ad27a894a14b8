"""What a step of the course is. Never torch.

The right function of a step is its text, its solution and the measure of the learner's: signature and docstring make
the file that a learner fills, its source is the last hint, and what it returns is what a learner's function is compared
with. Tests hold these functions to the library's own pass.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np

Function = Callable[..., Any]
Arguments = tuple[Any, ...]


@runtime_checkable
class Stateful(Protocol):
    """An argument whose calls have an effect on the next one, such as a choice by random numbers."""

    def anew(self) -> Self:
        """Return it as it was before its first call."""
        ...


def own_state(args: Arguments) -> Arguments:
    """Return arguments for one more call: those with a state begin anew."""
    return tuple(arg.anew() if isinstance(arg, Stateful) else arg for arg in args)


def something_is_kept(args: Arguments, yours: tuple[Any, ...] | None, right: tuple[Any, ...]) -> str:
    """Return the cause of a result that an earlier call has changed."""
    del args, yours, right
    return (
        "Something of an earlier call is used again, from a global, a cache, a class or a default argument: alone, "
        "this call is right. Compute from the arguments only."
    )


@dataclass(frozen=True, slots=True)
class Mistake:
    """Something that is often done wrong.

    Attributes:
        cause: The mistake in a sentence.
        wrong: The step's function with the mistake in it. Where a learner's results equal its results, this is what
            happened.
        section: Where the course explains it; the step's own section where empty.
    """

    cause: str
    wrong: Function
    section: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """One function that a learner writes.

    Attributes:
        right: The right function. Arrays are numpy's, float32.
        title: What the step is about, in a few words.
        about: The text above the function: what it is for.
        section: Where the course explains it: a chapter's file name without `.md`, `#`, and a heading.
        stage: The id of the page's stage beside which it stands.
        outputs: What it returns: a name and the axes of each array, such as `q TNH`; "" for what is no array.
        hints: Two hints; the third is the solution.
        cases: Arguments of random shapes, small, on which the mistakes show.
        mistakes: What is often done wrong.
        cause_of_keeping: The cause where a result is wrong because of an earlier call, by what was given, returned
            (None where it raised) and right.
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
        """The function's name, which is the step's."""
        return self.right.__name__
