"""Comparing what a learner's function returned with what is right. Never torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

RELATIVE = 1e-4
"""The allowed distance, as a share of a row's largest number: float32 sums of some thousand terms, in any order, and
angles computed in float32, differ by some 1e-6 to 2e-5; the smallest of the mistakes by 1e-3."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first number that is not the right one.

    Attributes:
        output: The name of the array, or "" where there is only one result, which is no array.
        at: Its index by axis, such as {"T": 2, "N": 0, "H": 5}.
        yours: What was returned.
        right: What is right.
    """

    output: str
    at: dict[str, int]
    yours: Any
    right: Any


def shape_problem(outputs: Sequence[str], yours: Sequence[Any], right: Sequence[Any]) -> str | None:
    """Return what is wrong with the number, the shapes or the dtypes of the results, or None."""
    if len(yours) != len(right):
        names = ", ".join(name.split()[0] for name in outputs) if outputs[0] else "one result"
        return f"returned {_count(len(yours), 'result')}; expected {len(right)}: {names}"
    for output, mine, expected in zip(outputs, yours, right, strict=True):
        problem = _array_problem(output, mine, expected) if output else _value_problem(mine, expected)
        if problem is not None:
            return problem
    return None


def first_difference(outputs: Sequence[str], yours: Sequence[Any], right: Sequence[Any]) -> Difference | None:
    """Return the first number that parts, by results in their order, by tokens and heads; None if there is none."""
    for output, mine, expected in zip(outputs, yours, right, strict=True):
        if not output:
            if not _same_value(mine, expected):
                return Difference("", {}, mine, expected)
            continue
        name, axes = output.split()
        wrong = np.argwhere(~is_close(mine, expected))
        if len(wrong):
            place = tuple(int(number) for number in min(wrong.tolist(), key=lambda index: _token_first(index, axes)))
            at = dict(zip(axes if axes != "*" else "ij"[: len(place)], place, strict=True))
            return Difference(name, at, float(mine[place]), float(expected[place]))
    return None


def is_close(mine: NDArray[Any], expected: NDArray[Any]) -> NDArray[np.bool_]:
    """Return where two arrays of one shape are equal but for rounding, by the size of a row."""
    size = np.abs(expected).max(axis=-1, keepdims=True) if expected.ndim and expected.size else np.abs(expected)
    return np.abs(mine - expected) <= RELATIVE * np.maximum(size, 1e-12)


def same(outputs: Sequence[str], yours: Sequence[Any], wrong: Sequence[Any]) -> bool:
    """Return whether results are those of a mistake: of the same shapes and numbers, NaN in the same places."""
    if len(yours) != len(wrong):
        return False
    return all(
        _same_array(mine, other) if output else _value_problem(mine, other) is None and _same_value(mine, other)
        for output, mine, other in zip(outputs, yours, wrong, strict=True)
    )


def _same_array(mine: Any, wrong: NDArray[Any]) -> bool:
    if (
        not isinstance(mine, np.ndarray)
        or mine.shape != wrong.shape
        or not np.array_equal(np.isnan(mine), np.isnan(wrong))
    ):
        return False
    return bool(is_close(np.nan_to_num(mine), np.nan_to_num(wrong)).all())


def _token_first(index: Sequence[int], axes: str) -> tuple[int, ...]:
    """Return an order in which the earlier token comes first, whatever the place of its axis is."""
    token = axes.index("T") if "T" in axes else 0
    return (index[token], *index)


def _array_problem(output: str, mine: Any, expected: NDArray[Any]) -> str | None:
    name, axes = output.split()
    if not isinstance(mine, np.ndarray):
        return f"{name} is {_kind(mine)}; expected an array of shape {expected.shape}"
    if mine.dtype.kind not in "f" or mine.dtype.itemsize < 4:
        return f"{name} has dtype {mine.dtype}; expected float32"
    if mine.shape != expected.shape:
        letters = "" if axes == "*" else f" ({', '.join(axes)})"
        return f"{name} has shape {mine.shape}; expected {expected.shape}{letters}"
    if not np.isfinite(mine).all():
        count = int((~np.isfinite(mine)).sum())
        return f"{name} holds {_count(count, 'number')} that {'is' if count == 1 else 'are'} NaN or infinite"
    return None


def _value_problem(mine: Any, expected: Any) -> str | None:
    if isinstance(expected, list):
        kind = "bytes" if expected and isinstance(expected[0], bytes) else "ids"
        if not isinstance(mine, (list, tuple)):
            return f"returned {_kind(mine)}; expected a list of {kind}"
        return None
    wanted = int if isinstance(expected, int) else float
    if isinstance(mine, np.ndarray) and mine.size != 1:
        return f"returned an array of shape {mine.shape}; expected one number"
    if wanted is float and isinstance(mine, (float, int, np.number, np.ndarray)):
        return None if np.isfinite(float(mine)) else f"returned {float(mine)}, which is no finite number"
    if wanted is int and isinstance(mine, (int, np.integer)) and not isinstance(mine, bool):
        return None
    if wanted is int and isinstance(mine, np.ndarray) and mine.dtype.kind in "iu":
        return None
    return f"returned {_kind(mine)}; expected {'an id (int)' if wanted is int else 'a number (float)'}"


def _same_value(mine: Any, expected: Any) -> bool:
    if isinstance(expected, list):
        return [_plain(item) for item in mine] == expected
    if isinstance(expected, float):
        return abs(float(mine) - expected) <= RELATIVE * max(abs(expected), 1e-3)
    return int(mine) == expected


def _plain(item: Any) -> Any:
    return int(item) if isinstance(item, (np.integer, np.ndarray)) else item


def _kind(value: Any) -> str:
    return "None: is `return` missing?" if value is None else f"a {type(value).__name__}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
