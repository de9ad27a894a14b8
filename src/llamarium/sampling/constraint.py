"""The sampler's interface to the form of an answer, independent of grammars and texts."""

from collections.abc import Collection
from enum import IntEnum, unique
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@unique
class NoToken(IntEnum):
    """Why a row got no token, in place of an id."""

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
        "the model's logits are NaN or infinite, so no token can be chosen; the weights may be damaged (NaN), or the "
        "dtype too narrow for this model (try float32)"
    ),
    NoToken.NOTHING_FITS: (
        "no token continues the answer by its grammar; the vocabulary lacks a character that it needs, or a stop "
        "token id stands in its way"
    ),
    NoToken.TOO_MUCH_WORK: (
        "the grammar took more work at one token than the limits allow; it has too many ways to read the same text"
    ),
    NoToken.NOT_ASKED: "no token was asked for: the answer has none",
    NoToken.TIMED_OUT: "the request's time was over before its answer came to its end",
    NoToken.PROCESSOR_FAILED: "the logits processor failed",
    NoToken.PROCESSOR_EXCLUDES: (
        "the logits processor excluded every token that may come next by the answer's form or by min_tokens; leave at "
        "least one of them"
    ),
}


class Constraint(Protocol):
    """The form of one answer: which tokens may come next; stop ids may where the answer can end."""

    @property
    def is_finished(self) -> bool:
        """Whether the answer is complete and nothing can follow."""
        ...

    @property
    def failure(self) -> NoToken:
        """Why no token is allowed, where none is."""
        ...

    def mask(self) -> NDArray[np.uint32]:
        """Return a bit for each token, the lowest of the first word for token 0; shape (ceil(V / 32),).

        It is computed from the moment the last token was accepted; this waits for its end. Valid until `accept`.
        """
        ...

    def accept(self, token_id: int) -> None:
        """Take the next token, one that the mask allows."""
        ...


class CompiledGrammar(Protocol):
    """A grammar, compiled for one vocabulary."""

    def begin(self, stop_ids: Collection[int]) -> Constraint:
        """Return the form of a new answer; `stop_ids` are allowed only where it can end, even if they have a text."""
        ...
