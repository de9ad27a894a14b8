"""What a step of the course is. Never torch.

The right function of a step is its text, its solution and the measure of the learner's: signature and docstring make
the file that a learner fills, its source is the last hint, and what it returns is what a learner's function is compared
with. Tests hold these functions to the library's own pass.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

Function = Callable[..., Any]
Arguments = tuple[Any, ...]


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

    @property
    def name(self) -> str:
        """The function's name, which is the step's."""
        return self.right.__name__
