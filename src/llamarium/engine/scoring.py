"""Log-probabilities of a prompt's tokens, gathered over the steps that run it. Never torch.

The logits after each token say how probable the next one was. They are half a megabyte a token for a vocabulary of
128,256, so a step computes `MAX_LOGITS_BYTES` of them at most, and of each row only what was asked for is kept.

Keys and values that are in the cache came without logits. So a request of this kind takes none of them; after a
preemption it takes those of tokens whose successors have been scored.
"""

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from llamarium.runtime.runner import Logits
from llamarium.sampling.sampler import Sampler

MAX_LOGITS_BYTES = 64 * 2**20
"""Logits of prompt tokens in a step."""


def most_logits(vocab_size: int) -> int:
    """Return of how many prompt tokens a step may compute the logits."""
    return max(1, MAX_LOGITS_BYTES // (4 * vocab_size))


class PromptScores:
    """Log-probability of each of a prompt's T tokens given those before, and the k most probable at its place.

    `is_finite` is whether all logits so far have had a finite maximum.
    """

    def __init__(self, ids: Sequence[int], num_top: int) -> None:
        self.ids, self.is_finite = ids, True
        self._shape, self._num_known = (len(ids), num_top), 1

    @cached_property  # as are the others: of several answers to a prompt, one alone gathers
    def logprobs(self) -> NDArray[np.float64]:
        """(T,); the first is NaN, as nothing comes before it."""
        return np.full(self._shape[0], math.nan)

    @cached_property
    def top_ids(self) -> NDArray[np.int32]:
        """(T, k), the most probable first; row 0 is undefined."""
        return np.zeros(self._shape, np.int32)

    @cached_property
    def top_logprobs(self) -> NDArray[np.float64]:
        """(T, k)."""
        return np.full(self._shape, math.nan)

    @property
    def num_skipped(self) -> int:
        """How many of the prompt's first tokens need no more logits, so that their keys and values may be reused."""
        return self._num_known - 1

    @property
    def is_complete(self) -> bool:
        """Whether all tokens have been scored."""
        return self._num_known == len(self.ids)

    def num_wanted(self, start: int, end: int) -> int:
        """Return how many tokens from `start` to before `end`, the last ones, have logits that score the next one."""
        return max(0, min(end, len(self.ids) - 1) - max(start, self.num_skipped))

    def take(self, logits_WV: Logits, sampler: Sampler) -> None:
        """Score the next tokens from logits of `num_wanted` places; stop and note it if they are not finite."""
        for row in range(len(logits_WV)):
            place = self._num_known
            found = sampler.logprobs(logits_WV[row], self.ids[place], self._shape[1])
            if found.token_id < 0:
                self.is_finite = False
                return
            self.logprobs[place] = found.logprob
            for rank, (token_id, logprob) in enumerate(found.top):
                self.top_ids[place, rank], self.top_logprobs[place, rank] = token_id, logprob
            self._num_known += 1
