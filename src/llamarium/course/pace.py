"""How much of a call a slow function can be asked.

A product of the model's sizes takes NumPy a millisecond and a loop over single numbers a minute. Both are right. So a
function is tried with a few tokens and a few rows of its weights, real ones; what it takes for these says whether the
whole call fits, or which part of it does.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from llamarium.course.step import Arguments

_TRIED_WORK = 1e5
"""Multiplications of the first call: 0.02 s in a loop over single numbers."""


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
"""Of the steps with products of the model's sizes: a call with the first so many tokens and a share of the weights'
rows. Calls of all other steps are small."""


def _work(args: Arguments) -> float:
    """Return how many multiplications a call takes: one for each number of the weights, for each token."""
    weights: list[Any] = [arg for arg in args[1:] if isinstance(arg, np.ndarray)]
    return len(args[0]) * sum(weight.size for weight in weights)


class Pace:
    """What a function takes, and so how much of a call fits into the time that is left."""

    def __init__(self, step: str) -> None:
        self._part_of = _PARTS.get(step)
        self._seconds_per_work: dict[bool, float] = {}
        self.has_shortened = False

    def fitting(self, args: Arguments, seconds: float) -> Arguments:
        """Return arguments that can be computed in a part of so many seconds: these, or a part of them."""
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
        """Note what a call took. One token and several are apart, as functions may compute them in two ways."""
        if self._part_of is not None:
            self._seconds_per_work[len(args[0]) == 1] = seconds / _work(args)

    def _part(self, args: Arguments, work: float) -> Arguments:
        """Return a call of about this work: two tokens at least, where there are several, and then more rows."""
        assert self._part_of is not None
        num_tokens = len(args[0])
        of_a_token = _work(args) / num_tokens
        tokens = max(min(2, num_tokens), min(num_tokens, int(work / of_a_token)))
        return self._part_of(args, tokens, work / (tokens * of_a_token))
