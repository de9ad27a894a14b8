"""Log-probabilities of a prompt's tokens, collected over the steps that compute it. Torch-free.

The logits after a token score the next one. A vocabulary of 128,256 makes that half a megabyte per token, so a step
computes at most `MAX_LOGITS_BYTES` of them, and only the requested log-probabilities are kept.

Cached keys and values come without logits, so such a request uses the prefix cache only after a preemption, for tokens
whose successors have been scored already.
"""

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from llamarium.runtime.runner import Logits
from llamarium.sampling.sampler import Sampler

MAX_LOGITS_BYTES = 64 * 2**20
"""Maximum size of the logits of prompt tokens in a step."""


def most_logits(vocab_size: int) -> int:
    """Return for how many prompt tokens a step may compute logits."""
    return max(1, MAX_LOGITS_BYTES // (4 * vocab_size))


class PromptScores:
    """Log-probabilities of a prompt's T tokens given the tokens before, and the k most likely tokens at each position.

    `is_finite` is False once logits without a finite maximum were seen.
    """

    def __init__(self, ids: Sequence[int], num_top: int) -> None:
        self.ids, self.is_finite = ids, True
        self._shape, self._num_known = (len(ids), num_top), 1

    # The arrays are allocated at their first use: of several answers to a prompt, only one collects scores.

    @cached_property
    def logprobs(self) -> NDArray[np.float64]:
        """Log-probabilities, (T,); the first is NaN, as no token precedes it."""
        return np.full(self._shape[0], math.nan)

    @cached_property
    def top_ids(self) -> NDArray[np.int32]:
        """The most likely ids, (T, k), best first; row 0 is undefined."""
        return np.zeros(self._shape, np.int32)

    @cached_property
    def top_logprobs(self) -> NDArray[np.float64]:
        """Their log-probabilities, (T, k)."""
        return np.full(self._shape, math.nan)

    @property
    def num_skipped(self) -> int:
        """Number of first tokens that need no more logits, so that the prefix cache may supply them."""
        return self._num_known - 1

    @property
    def is_complete(self) -> bool:
        """True once all tokens have been scored."""
        return self._num_known == len(self.ids)

    def num_wanted(self, start: int, end: int) -> int:
        """Return how many of the last tokens from `start` to before `end` need logits, to score their successors."""
        return max(0, min(end, len(self.ids) - 1) - max(start, self.num_skipped))

    def take(self, logits_WV: Logits, sampler: Sampler) -> None:
        """Score the next tokens from `num_wanted` rows of logits; stop and clear `is_finite` if they are not finite."""
        for row in range(len(logits_WV)):
            position = self._num_known
            scored = sampler.logprobs(logits_WV[row], self.ids[position], self._shape[1])
            if scored.token_id < 0:
                self.is_finite = False
                return
            self.logprobs[position] = scored.logprob
            for rank, (token_id, logprob) in enumerate(scored.top):
                self.top_ids[position, rank], self.top_logprobs[position, rank] = token_id, logprob
            self._num_known += 1
