"""Reduces calls to a size that a slow function can compute in time.

A matrix product of the model's size takes a millisecond with NumPy, and a minute with plain Python loops. Both are
right. So a function is first called with a few tokens and rows of the weights; its speed then determines whether the
whole call fits into the time limit, or which part of it does.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from llamarium.course.step import Arguments

_TRIED_WORK = 1e5
"""Multiplications in the first call: 0.02 s with plain Python loops."""


def _rows(count: int, share: float) -> int:
    return max(1, min(count, int(count * share)))


def _part_of_project(args: Arguments, tokens: int, share: float) -> Arguments:
    x_TD, w_q, w_k, w_v, num_heads, num_kv_heads = args
    kv_heads = _rows(num_kv_heads, share)
    heads, rows = kv_heads * num_heads // num_kv_heads, kv_heads * len(w_k) // num_kv_heads
    return x_TD[:tokens], w_q[: heads * len(w_q) // num_heads], w_k[:rows], w_v[:rows], heads, kv_heads


def _part_of_swiglu(args: Arguments, tokens: int, share: float) -> Arguments:
    x_TD, w_gate_FD, w_up_FD, w_down_DF = args
    rows = _rows(len(w_gate_FD), share)
    return x_TD[:tokens], w_gate_FD[:rows], w_up_FD[:rows], w_down_DF[:, :rows]


def _part_of_product(args: Arguments, tokens: int, share: float) -> Arguments:
    x, w = args
    return x[:tokens], w[: _rows(len(w), share)]


_PARTS: dict[str, Callable[[Arguments, int, float], Arguments]] = {
    "project": _part_of_project, "join": _part_of_product, "swiglu": _part_of_swiglu, "head": _part_of_product
}  # fmt: skip
"""Reduce a call to a number of tokens and a share of the weights' rows, by name of the step.

Other steps have no large matrix products, so their calls are always small.
"""


def _work(args: Arguments) -> float:
    """Return the number of multiplications in a call: tokens times weights."""
    weights: list[Any] = [arg for arg in args[1:] if isinstance(arg, np.ndarray)]
    return len(args[0]) * sum(weight.size for weight in weights)


class Pace:
    """The measured speed of a function, which determines how much of a call fits into the remaining time.

    Attributes:
        has_shortened: Whether a call was reduced because the function is slow.
    """

    def __init__(self, step: str) -> None:
        self._part_of = _PARTS.get(step)
        self._seconds_per_work: dict[bool, float] = {}
        self.has_shortened = False

    def fitting(self, args: Arguments, seconds: float) -> Arguments:
        """Return the arguments, or a part of them that can be computed within a fraction of `seconds`."""
        if self._part_of is None:
            return args
        whole, pace = _work(args), self._seconds_per_work.get(len(args[0]) == 1)
        if pace is None:
            return self._part(args, _TRIED_WORK)
        if pace * whole <= seconds / 2:
            return args
        self.has_shortened = True
        return self._part(args, max(_TRIED_WORK, seconds / 8 / pace))

    def took(self, args: Arguments, seconds: float) -> None:
        """Record the CPU time of a call, separately for one and several tokens, which may take different code paths."""
        if self._part_of is not None:
            self._seconds_per_work[len(args[0]) == 1] = seconds / _work(args)

    def _part(self, args: Arguments, work: float) -> Arguments:
        """Return a part of a call with about `work` multiplications, and at least two tokens if there are several."""
        assert self._part_of is not None
        num_tokens = len(args[0])
        of_a_token = _work(args) / num_tokens
        tokens = max(min(2, num_tokens), min(num_tokens, int(work / of_a_token)))
        return self._part_of(args, tokens, work / (tokens * of_a_token))
