"""Prompt lookup: propose what followed the last few tokens when they stood in the sequence before. Never torch.

Where an answer repeats its prompt or itself (a text is summarised, a program edited, a list continued), the draft costs
a dictionary look-up. How often it is right depends on the text, and what a wider pass costs on model and machine. Both
are measured all the time, and `PromptLookup` proposes as many tokens as bring the most tokens a second; often none.

Source: prompt lookup decoding (A. Saxena, 2023).
"""

from collections.abc import Callable, Sequence

from llamarium.engine.proposers.base import TRIAL_SHARE, TRIAL_TOKENS, ProposerPolicy, averaged
from llamarium.engine.sequence import Draft, EngineSequence
from llamarium.runtime.runner import CacheDtype

# Sizes of n-grams that are looked up, and how often the token after one is the proposed one, before anything is known.
# Measured on this project's own guides and sources: 0.15 to 0.28 for single tokens, which rarely pays; then 0.32 to
# 0.40 and 0.46 to 0.68, and 0.68 to 0.94 from five tokens on.
_RATES = {5: 0.7, 3: 0.4, 2: 0.2}


class PromptLookup(ProposerPolicy):
    """Proposes tokens that were said before, as many as pay, and counts what came of it."""

    option = "prompt_lookup"

    def __init__(self, num_tokens: int = 15) -> None:
        super().__init__(num_tokens)
        self._rates = dict(_RATES)
        self._trial_s = 0.0  # what a trial may cost by now

    def open(
        self, num_blocks: int, block_size: int, kv_cache_dtype: CacheDtype, clock: Callable[[], float]
    ) -> "LookupProposer":
        """Return the proposer of an engine; it needs no cache."""
        return LookupProposer(self)

    def best_length(self, ngram: int, num_rows: int = 1) -> int:
        """Return how many tokens to run of a draft that follows an n-gram of this size; 0 if that does not pay.

        If a token is right with probability p at each place, a pass over a draft of k tokens for one of R sequences
        gives R + p + ... + p^k tokens. Where that is slower than one token a sequence, a draft is run all the same once
        the time for a trial has been saved: how often drafts are right is seen without running them, their cost is not.
        """
        single_s = self._single_s.get(num_rows)
        if single_s is None:
            return 0
        extra_s = self.extra_s(num_rows)
        best, best_speed = 0, num_rows / single_s
        power, expected = 1.0, float(num_rows)
        for length in range(1, self.num_tokens + 1):
            power *= self._rates[ngram]
            expected += power
            speed = expected / (single_s + length * extra_s)
            if speed > best_speed:
                best, best_speed = length, speed
        trial = min(TRIAL_TOKENS, self.num_tokens)
        return trial if best == 0 and self._trial_s >= trial * extra_s else best

    def record_pass(self, num_rows: int, num_drafted: int, seconds: float) -> None:
        """Note the time of a pass over one token of each sequence and `num_drafted` further ones."""
        super().record_pass(num_rows, num_drafted, seconds)
        if not num_drafted:
            self._trial_s += TRIAL_SHARE * seconds
        elif num_rows in self._single_s:
            self._trial_s = 0.0

    def record_token(self, is_right: bool, ngram: int = 0) -> None:
        """Note whether a draft's token was chosen, whether it was run or not."""
        self._rates[ngram] = averaged(self._rates[ngram], float(is_right))


class LookupProposer:
    """Proposes by looking up each sequence's own tokens."""

    def __init__(self, policy: PromptLookup) -> None:
        self.policy = policy
        self._indexes: dict[EngineSequence, NgramIndex] = {}

    def reserve(self, num_blocks: int) -> None:
        """Do nothing: there is no cache."""

    def propose(self, sequences: Sequence[EngineSequence], num_rows: int) -> list[Draft]:
        """Return a draft for each sequence."""
        return [self._propose(sequence, num_rows) for sequence in sequences]

    def release(self, sequence: EngineSequence) -> None:
        """Forget a sequence."""
        self._indexes.pop(sequence, None)

    def _propose(self, sequence: EngineSequence, num_rows: int) -> Draft:
        index = self._indexes.get(sequence)
        if index is None:
            index = self._indexes[sequence] = NgramIndex(sequence.ids)
        ngram, ids = index.guess(self.policy.num_tokens)
        room = sequence.limit - len(sequence.ids)
        num_scheduled = min(self.policy.best_length(ngram, num_rows), room - 1) if ids else 0
        return Draft(ids[: max(1, num_scheduled)], num_scheduled, ngram)


class NgramIndex:
    """Where the last tokens of a growing sequence stood before; a look-up takes the same time at any length."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids
        self._known = 0  # so many tokens have been entered as what follows an n-gram
        self._next: dict[tuple[int, ...], int] = {}  # n-gram to the place after its last occurrence

    def guess(self, count: int) -> tuple[int, list[int]]:
        """Return the size of the longest n-gram that ends the sequence and stood in it before, and what followed.

        What followed is `count` tokens: where it runs into the sequence's end, it goes on with itself, so that a
        repetition is continued. Without any such n-gram the size is 0 and nothing follows.
        """
        ids = self.ids
        for place in range(self._known, len(ids)):
            for size in _RATES:
                if size <= place:
                    self._next[tuple(ids[place - size : place])] = place
        self._known = len(ids)
        for size in _RATES:
            place = self._next.get(tuple(ids[-size:]))
            if place is not None:
                period = len(ids) - place
                return size, [ids[place + i % period] for i in range(count)]
        return 0, []
