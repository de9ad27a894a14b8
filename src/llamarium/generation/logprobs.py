"""Log-probabilities with their tokens' texts: of an answer's tokens, and of a prompt's. Never torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from llamarium.engine.scoring import PromptScores
from llamarium.tokenizer.base import Tokenizer


@dataclass(frozen=True, slots=True)
class Alternative:
    """A possible token: id, text as tables show it, and natural log-probability before sampling parameters."""

    token_id: int
    token: str
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob(Alternative):
    """The token that came, and the most probable ones at that place, as many as `logprobs` asked for, best first."""

    top: tuple[Alternative, ...]


class PromptLogprobs(Sequence[TokenLogprob | None]):
    """An entry for each token of a prompt; None for the first, as nothing comes before it.

    A prompt may be long, so entries are made when they are looked at.
    """

    def __init__(self, tokenizer: Tokenizer, scores: PromptScores) -> None:
        self._tokenizer, self._scores = tokenizer, scores

    @property
    def ids(self) -> Sequence[int]:
        """The prompt's tokens."""
        return self._scores.ids

    def __len__(self) -> int:
        return len(self._scores.ids)

    @overload
    def __getitem__(self, place: int) -> TokenLogprob | None: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[TokenLogprob | None, ...]: ...
    def __getitem__(self, place: int | slice) -> TokenLogprob | tuple[TokenLogprob | None, ...] | None:
        places = range(len(self))[place]
        return self._entry(places) if isinstance(places, int) else tuple(map(self._entry, places))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PromptLogprobs):
            return NotImplemented
        mine, theirs = self._scores, other._scores
        return list(mine.ids) == list(theirs.ids) and all(
            np.array_equal(getattr(mine, name)[1:], getattr(theirs, name)[1:])
            for name in ("logprobs", "top_ids", "top_logprobs")
        )

    def _entry(self, place: int) -> TokenLogprob | None:
        if place == 0:
            return None
        scores, text = self._scores, self._tokenizer.token_text
        top_ids, top_logprobs = scores.top_ids[place].tolist(), scores.top_logprobs[place].tolist()
        top = tuple(Alternative(i, text(i), logprob) for i, logprob in zip(top_ids, top_logprobs, strict=True))
        token_id = scores.ids[place]
        return TokenLogprob(token_id, text(token_id), float(scores.logprobs[place]), top)
