"""How many prompt tokens fit into a step beside the sequences that decode, learned from the time of earlier steps.

Only when tokens are computed depends on it, never which.
"""

from bisect import bisect_left
from collections.abc import Sequence

LEAST_CHUNK = 4
"""Prompt tokens beside decoding sequences, at least, so that a new request is served whatever the others cost."""

MAX_CHUNK_TOKENS = 2048
"""Prompt tokens in a step at most: bounds the activations of long ones."""

STRETCH = 2.0
"""How long a step may be with a prompt in it, in steps without, while no more sequences read prompts than decode."""

PAUSE_S = 0.1
"""How long a step may be that reads prompts whole: one pause disturbs a stream less than many long steps."""

LONGEST_STEP_S = 0.25
"""How long a step may be without decoding sequences: aborts are noticed between two."""

_FIRST_CHUNK = 128  # before anything is known
_WEIGHT = 1 / 4  # of the newest step in a moving average
_LEAST_ALONE = 16  # prompt tokens without decoding sequences, at least
_CANDIDATES = (4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)


class Pace:
    """Seconds of a step by the number of its tokens: a moving average for each size met, and a line between two.

    A prompt token costs the more the deeper it stands, so the cost of those beside decoding ones is followed from step
    to step.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._sizes: list[int] = []
        self._prompt_token_s: float | None = None  # beside decoding sequences, in the last such steps
        self._last_chunk = 0  # prompt tokens in the last of them: the next one has at most twice as many

    def record(self, num_streaming: int, num_prompt: int, seconds: float) -> None:
        """Note the time of a step with so many tokens of decoding sequences and of prompts."""
        alone = self.estimate(num_streaming) if num_streaming and num_prompt else None
        if alone is not None:
            cost, known = max(0.0, seconds - alone) / num_prompt, self._prompt_token_s
            self._prompt_token_s = cost if known is None else known + _WEIGHT * (cost - known)
            self._last_chunk = num_prompt
        self._note(num_streaming + num_prompt, seconds)

    def _note(self, num_tokens: int, seconds: float) -> None:
        """Note the time by the number of tokens; sizes above 16 are put together by their three highest bits."""
        size = _rounded(num_tokens)
        seconds *= size / num_tokens
        if size in self._seconds:
            self._seconds[size] += _WEIGHT * (seconds - self._seconds[size])
        else:
            self._sizes.insert(bisect_left(self._sizes, size), size)
            self._seconds[size] = seconds

    def estimate(self, num_tokens: int) -> float | None:
        """Return the seconds of a step of so many tokens; None before any was measured.

        It is never more than in proportion to the nearest measured size below: so a size that was slow once is tried
        again.
        """
        if not self._sizes:
            return None
        place = bisect_left(self._sizes, num_tokens)
        if place == 0:
            return self._seconds[self._sizes[0]]
        low = self._sizes[place - 1]
        if place == len(self._sizes):
            return self._seconds[low] * num_tokens / low
        high = self._sizes[place]
        share = (num_tokens - low) / (high - low)
        between = self._seconds[low] + share * (self._seconds[high] - self._seconds[low])
        return min(between, self._seconds[low] * num_tokens / low)

    def chunk(self, num_streaming: int, prompts: Sequence[int]) -> int:
        """Return how many prompt tokens the next step may run beside a token of each decoding sequence.

        `prompts` are the tokens of each prompt that is being read, computed ones included. While more sequences read
        prompts than decode, prompts have that many times more of a step.
        """
        alone = self.estimate(num_streaming) if num_streaming else 0.0
        if alone is None or not self._sizes:
            return LEAST_CHUNK if num_streaming else _FIRST_CHUNK
        if not num_streaming:
            return self._most(0, LONGEST_STEP_S)
        if self._most(num_streaming, PAUSE_S) >= (whole := sum(prompts)):
            return whole
        stretched_s = STRETCH * alone
        share = max(1.0, len(prompts) / num_streaming)
        most_s = max(stretched_s, min(LONGEST_STEP_S, alone + share * (stretched_s - alone)))
        if self._prompt_token_s is None:
            return self._most(num_streaming, most_s)
        room = int(min((most_s - alone) / max(self._prompt_token_s, 1e-9), 2 * self._last_chunk))
        return min(max(room, LEAST_CHUNK), MAX_CHUNK_TOKENS)

    def _most(self, num_streaming: int, most_s: float) -> int:
        """Return how many prompt tokens a step of so many seconds has room for, or the least there is."""
        chunk = LEAST_CHUNK if num_streaming else _LEAST_ALONE
        for size in _CANDIDATES:
            seconds = self.estimate(num_streaming + size)
            if seconds is None or seconds > most_s:
                break
            chunk = size
        return chunk


def _rounded(num_tokens: int) -> int:
    bits = max(0, num_tokens.bit_length() - 3) if num_tokens > 16 else 0
    return num_tokens >> bits << bits
