"""The chunk size of prefill: how many prompt tokens a step may run beside decoding sequences.

It is learned from the times of earlier steps. It affects only when tokens are computed, never their values.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import takewhile

LEAST_CHUNK = 4
"""Minimum number of prompt tokens beside decoding sequences, so that a new request always makes progress."""

MAX_CHUNK_TOKENS = 2048
"""Maximum number of prompt tokens per step; bounds the memory of activations."""

STRETCH = (2.0, 2.4, 3.0)
"""How many times a decode-only step a step may take with one, two, or more prompts in prefill. Smaller factors would
let prompts pile up."""

PAUSE_S = 0.1
"""If a step can finish all prompts within this time, it does: one pause disturbs a stream less than many long steps."""

LONGEST_STEP_S = 0.25
"""Maximum duration of a step without decoding sequences, as aborts take effect between steps."""

_SHORT = 512  # up to so many prompt tokens in total count as one more prompt, as they are finished soon
_FIRST_CHUNK = 128  # before the first measurement
_WEIGHT = 1 / 4  # of the newest step in the moving averages
_MOST_GROWTH = 1.25  # of an average in one step: a step whose thread lost its core says nothing about the next
_MOST_BESIDE = 16  # consecutive mixed steps before a decode-only step measures again what decoding alone costs
_LEAST_ALONE = 16  # minimum number of prompt tokens without decoding sequences
_CANDIDATES = (4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)


class Pace:
    """A model of the time of a step by its number of tokens: a moving average per size, linear between sizes.

    The cost of a token grows with its position. So the cost of a prompt token is tracked from one mixed step to the
    next, and that of decoding in steps without prompt tokens.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._prompt_token_s = 0.0  # moving average over mixed steps; 0 before the first
        self._last_chunk = 0  # prompt tokens of the last mixed step; the next one has at most twice as many
        self._num_beside = 0  # mixed steps since the last decode-only step

    def record(self, num_streaming: int, num_prompt: int, seconds: float) -> None:
        """Record the time of a step with `num_streaming` decode tokens and `num_prompt` prompt tokens."""
        decode_s = self._alone(num_streaming) if num_streaming and num_prompt else None
        size, token_s = _rounded(num_streaming + num_prompt), seconds / (num_streaming + num_prompt)
        if decode_s is not None and decode_s > seconds:
            self._seconds[_rounded(num_streaming)] = seconds
        elif decode_s is not None:
            self._last_chunk, token_cost_s = num_prompt, max((seconds - decode_s) / num_prompt, token_s / 4)
            average = self._prompt_token_s or token_cost_s
            self._prompt_token_s = average + _WEIGHT * (min(token_cost_s, 2 * average) - average)
        self._num_beside = num_prompt and self._num_beside + (num_streaming > 0)
        average = self._seconds.get(size, size * token_s)
        self._seconds[size] = average + _WEIGHT * (min(size * token_s, _MOST_GROWTH * average) - average)

    def estimate(self, num_tokens: int) -> float | None:
        """Return the estimated seconds of a step of `num_tokens`; None before the first measurement.

        The estimate is at most proportional to the nearest smaller size, so that a size that was slow once is tried
        again.
        """
        if not (sizes := sorted(self._seconds)):
            return None
        index = bisect_left(sizes, num_tokens)
        if index == 0:
            return self._seconds[sizes[0]]
        low = sizes[index - 1]
        if index == len(sizes):
            return self._seconds[low] * num_tokens / low
        high = sizes[index]
        share = (num_tokens - low) / (high - low)
        interpolated = self._seconds[low] + share * (self._seconds[high] - self._seconds[low])
        return min(interpolated, self._seconds[low] * num_tokens / low)

    def chunk(self, num_streaming: int, prompts: Sequence[int]) -> int:
        """Return how many prompt tokens the next step may run beside one token of each decoding sequence.

        Args:
            num_streaming: Decoding sequences.
            prompts: Uncached tokens of each prompt in prefill, including those computed in earlier steps. If there are
                more prompts than decoding sequences, prefill gets a proportionally larger part of the step.
        """
        decode_s = self._alone(num_streaming)
        if decode_s is None:
            return LEAST_CHUNK if num_streaming else _FIRST_CHUNK
        if not num_streaming:
            return self._most(0, LONGEST_STEP_S)
        if self._most(num_streaming, PAUSE_S) >= (num_total := sum(prompts)):
            return num_total
        if self._num_beside >= _MOST_BESIDE:
            return 0
        index = len(prompts) - (num_total > _SHORT)
        stretch = max(STRETCH[min(index, len(STRETCH) - 1)], 1 + len(prompts) / num_streaming)
        max_s = max(STRETCH[0] * decode_s, min(LONGEST_STEP_S, stretch * decode_s))
        if not self._prompt_token_s:
            return self._most(num_streaming, max_s)
        room = int(min((max_s - decode_s) / self._prompt_token_s, 2 * self._last_chunk))
        return min(max(room, LEAST_CHUNK), MAX_CHUNK_TOKENS)

    def _alone(self, num_streaming: int) -> float | None:
        """Return the estimated seconds of a decode-only step, scaled from the average for about as many tokens."""
        size = max(1, _rounded(num_streaming))
        return self._seconds[size] * num_streaming / size if size in self._seconds else self.estimate(num_streaming)

    def _most(self, num_streaming: int, max_s: float) -> int:
        """Return how many prompt tokens fit into a step of `max_s` seconds, or the minimum."""
        fitting_sizes = takewhile(lambda size: (self.estimate(num_streaming + size) or 0.0) <= max_s, _CANDIDATES)
        return max(fitting_sizes, default=LEAST_CHUNK if num_streaming else _LEAST_ALONE)


def _rounded(num_tokens: int) -> int:
    """Return the size class of a number of tokens: above 16, its three highest bits."""
    bits = max(0, num_tokens.bit_length() - 3) if num_tokens > 16 else 0
    return num_tokens >> bits << bits
