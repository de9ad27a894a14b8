"""How many prompt tokens fit into a step beside the sequences that decode, learned from the time of earlier steps.

Only when tokens are computed depends on it, never which.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import takewhile

LEAST_CHUNK = 4
"""Prompt tokens beside decoding sequences, at least, in all but one step in 17: a new request is always served."""

MAX_CHUNK_TOKENS = 2048
"""Prompt tokens in a step at most: bounds the activations of long ones."""

STRETCH = (2.0, 2.4, 3.0)
"""How long a step may be while one prompt is read, two or more, in steps without: with less, several would pile up."""

PAUSE_S = 0.1
"""How long a step may be that reads prompts whole: one pause disturbs a stream less than many long steps."""

LONGEST_STEP_S = 0.25
"""How long a step may be without decoding sequences: aborts are noticed between two."""

_SHORT = 512  # tokens of prompts that count as one prompt more: they are over soon
_FIRST_CHUNK = 128  # before anything is known
_WEIGHT = 1 / 4  # of the newest step in a moving average
_MOST_GROWTH = 1.25  # of a time, as it is averaged: a step whose thread lost its core is no measure of the next
_MOST_BESIDE = 16  # steps with prompts beside streams, before one without them shows what the streams cost by now
_LEAST_ALONE = 16  # prompt tokens without decoding sequences, at least
_CANDIDATES = (4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)


class Pace:
    """Seconds of a step by the number of its tokens: a moving average for each size met, and a line between two.

    A token costs the more the deeper it stands: prompts' beside decoding ones are followed from step to step, and the
    decoding ones in steps without prompts.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._prompt_token_s = 0.0  # beside decoding sequences, in the last such steps; 0 before the first
        self._last_chunk = 0  # prompt tokens in the last of them: the next one has at most twice as many
        self._num_beside = 0  # steps since the last one of decoding sequences alone

    def record(self, num_streaming: int, num_prompt: int, seconds: float) -> None:
        """Note the time of a step with so many tokens of decoding sequences and of prompts."""
        alone = self._alone(num_streaming) if num_streaming and num_prompt else None
        size, token_s = _rounded(num_streaming + num_prompt), seconds / (num_streaming + num_prompt)
        if alone is not None and alone > seconds:
            self._seconds[_rounded(num_streaming)] = seconds
        elif alone is not None:
            self._last_chunk, cost = num_prompt, max((seconds - alone) / num_prompt, token_s / 4)
            known = self._prompt_token_s or cost
            self._prompt_token_s = known + _WEIGHT * (min(cost, 2 * known) - known)
        self._num_beside = num_prompt and self._num_beside + (num_streaming > 0)
        known = self._seconds.get(size, size * token_s)
        self._seconds[size] = known + _WEIGHT * (min(size * token_s, _MOST_GROWTH * known) - known)

    def estimate(self, num_tokens: int) -> float | None:
        """Return the seconds of a step of so many tokens; None before any was measured.

        It is never more than in proportion to the nearest measured size below: so a size that was slow once is tried
        again.
        """
        if not (sizes := sorted(self._seconds)):
            return None
        place = bisect_left(sizes, num_tokens)
        if place == 0:
            return self._seconds[sizes[0]]
        low = sizes[place - 1]
        if place == len(sizes):
            return self._seconds[low] * num_tokens / low
        high = sizes[place]
        share = (num_tokens - low) / (high - low)
        between = self._seconds[low] + share * (self._seconds[high] - self._seconds[low])
        return min(between, self._seconds[low] * num_tokens / low)

    def chunk(self, num_streaming: int, prompts: Sequence[int]) -> int:
        """Return how many prompt tokens the next step may run beside a token of each decoding sequence.

        `prompts` are the tokens of each prompt that is being read, computed ones included. While more of them are read
        than sequences decode, they have that many times the streams' part of a step.
        """
        alone = self._alone(num_streaming)
        if alone is None:
            return LEAST_CHUNK if num_streaming else _FIRST_CHUNK
        if not num_streaming:
            return self._most(0, LONGEST_STEP_S)
        if self._most(num_streaming, PAUSE_S) >= (whole := sum(prompts)):
            return whole
        if self._num_beside >= _MOST_BESIDE:
            return 0
        place = len(prompts) - (whole > _SHORT)
        stretch = max(STRETCH[min(place, len(STRETCH) - 1)], 1 + len(prompts) / num_streaming)
        most_s = max(STRETCH[0] * alone, min(LONGEST_STEP_S, stretch * alone))
        if not self._prompt_token_s:
            return self._most(num_streaming, most_s)
        room = int(min((most_s - alone) / self._prompt_token_s, 2 * self._last_chunk))
        return min(max(room, LEAST_CHUNK), MAX_CHUNK_TOKENS)

    def _alone(self, num_streaming: int) -> float | None:
        """Return the seconds of a step without prompts: the last ones of about so many tokens, or an estimate."""
        size = max(1, _rounded(num_streaming))
        return self._seconds[size] * num_streaming / size if size in self._seconds else self.estimate(num_streaming)

    def _most(self, num_streaming: int, most_s: float) -> int:
        """Return how many prompt tokens a step of so many seconds has room for, or the least there is."""
        fitting = takewhile(lambda size: (self.estimate(num_streaming + size) or 0.0) <= most_s, _CANDIDATES)
        return max(fitting, default=LEAST_CHUNK if num_streaming else _LEAST_ALONE)


def _rounded(num_tokens: int) -> int:
    """Return the size that a number of tokens counts as: above 16 its three highest bits."""
    bits = max(0, num_tokens.bit_length() - 3) if num_tokens > 16 else 0
    return num_tokens >> bits << bits
