"""The sampler's interface to constrained decoding, independent of grammars and text."""

from collections.abc import Collection
from enum import IntEnum, unique
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@unique
class NoToken(IntEnum):
    """The reason why a row got no token; takes the place of a token id."""

    NOT_FINITE = -1
    NOTHING_FITS = -2
    TOO_MUCH_WORK = -3
    NOT_ASKED = -4
    TIMED_OUT = -5
    PROCESSOR_FAILED = -6
    PROCESSOR_EXCLUDES = -7

    @property
    def message(self) -> str:
        """The message of the error."""
        return _MESSAGES[self]


_MESSAGES = {
    NoToken.NOT_FINITE: (
        "the model's logits are NaN or infinite, so no token can be sampled; the weights may be damaged (NaN), or the "
        "range of the dtype too small for this model (try float32)"
    ),
    NoToken.NOTHING_FITS: (
        "the grammar allows no token here: the vocabulary lacks a required character, or a required token is a stop "
        "token id"
    ),
    NoToken.TOO_MUCH_WORK: (
        "the grammar exceeded the work limit for one token; it is too ambiguous: simplify it so that each text can be "
        "parsed in fewer ways"
    ),
    NoToken.NOT_ASKED: "no token was requested",
    NoToken.TIMED_OUT: "the request timed out before its answer was finished",
    NoToken.PROCESSOR_FAILED: "the logits processor failed",
    NoToken.PROCESSOR_EXCLUDES: (
        "the logits processor excluded every token that the grammar and min_tokens allow; leave at least one of them"
    ),
}


class Constraint(Protocol):
    """The constraint on one answer: which tokens may come next. Stop ids may come where the answer may end."""

    @property
    def is_finished(self) -> bool:
        """Whether the answer is complete and nothing can follow."""
        ...

    @property
    def failure(self) -> NoToken:
        """The reason why no token is allowed."""
        ...

    def mask(self) -> NDArray[np.uint32]:
        """Return one bit per token, shape (ceil(V / 32),), starting with the lowest bit of the first word.

        The mask is computed in the background from the moment the last token was accepted; this waits for it. The
        result is valid until the next `accept`.
        """
        ...

    def accept(self, token_id: int) -> None:
        """Advance by a token, which the mask must allow."""
        ...


class CompiledGrammar(Protocol):
    """A grammar compiled for a vocabulary."""

    def begin(self, stop_ids: Collection[int]) -> Constraint:
        """Return the constraint of a new answer; `stop_ids` are allowed only where it may end."""
        ...
