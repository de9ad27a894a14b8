"""Compares the results of a learner's function with the right ones. Torch-free."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamarium.errors import counted

RELATIVE = 1e-4
"""Tolerance relative to a row's largest number. Float32 sums of a few thousand terms in any order, and angles computed
in float32, differ by 1e-6 to 2e-5; the smallest effect of a mistake is 1e-3."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first wrong number in a result.

    Attributes:
        output: Name of the array, or "" if the only result is not an array.
        at: Index by axis, e.g. {"T": 2, "N": 0, "H": 5}.
        yours: The learner's value.
        right: The right value.
    """

    output: str
    at: dict[str, int]
    yours: Any
    right: Any


def as_results(found: Any) -> tuple[Any, ...]:
    """Return a function's return value as a tuple of results."""
    return found if isinstance(found, tuple) else (found,)  # pyright: ignore[reportUnknownVariableType]


def shape_problem(outputs: Sequence[str], yours: Sequence[Any], right: Sequence[Any]) -> str | None:
    """Return what is wrong with the number, shapes, dtypes or types of the results, or None.

    Args:
        outputs: Names and axes of the results, as in `Step.outputs`.
        yours: The learner's results.
        right: The right results.
    """
    if len(yours) != len(right):
        names = ", ".join(name.split()[0] for name in outputs) if outputs[0] else "one result"
        return f"returned {counted(len(yours), 'result')}; expected {len(right)}: {names}"
    for output, mine, expected in zip(outputs, yours, right, strict=True):
        problem = _array_problem(output, mine, expected) if output else _value_problem(mine, expected)
        if problem is not None:
            return problem
    return None


def first_difference(outputs: Sequence[str], yours: Sequence[Any], right: Sequence[Any]) -> Difference | None:
    """Return the first wrong number, ordered by result, token and remaining axes, or None if all are right."""
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
    """Return a mask of the elements that are equal within `RELATIVE` times the row's largest number."""
    size = np.abs(expected).max(axis=-1, keepdims=True) if expected.ndim and expected.size else np.abs(expected)
    return np.abs(mine - expected) <= RELATIVE * np.maximum(size, 1e-12)


def same(outputs: Sequence[str], yours: Sequence[Any], wrong: Sequence[Any]) -> bool:
    """Whether results equal those of a mistake, with non-finite numbers in the same places."""
    if len(yours) != len(wrong):
        return False
    return all(
        _same_array(mine, other) if output else _is_same_value(mine, other)
        for output, mine, other in zip(outputs, yours, wrong, strict=True)
    )


def _is_same_value(mine: Any, wrong: Any) -> bool:
    if all(isinstance(value, (float, np.floating)) for value in (mine, wrong)):
        if not np.isfinite(mine) or not np.isfinite(wrong):
            return bool(np.array_equal(mine, wrong, equal_nan=True))
    elif isinstance(mine, list) and isinstance(wrong, list) and mine == wrong:  # e.g. of str, which is never right
        return True
    return _value_problem(mine, wrong) is None and _same_value(mine, wrong)


def _same_array(mine: Any, wrong: NDArray[Any]) -> bool:
    if not isinstance(mine, np.ndarray) or mine.dtype.kind not in "fiu" or mine.shape != wrong.shape:
        return False
    is_odd = ~np.isfinite(wrong)
    if not np.array_equal(mine[is_odd], wrong[is_odd], equal_nan=True) or not np.isfinite(mine[~is_odd]).all():
        return False
    return bool(is_close(np.where(is_odd, 0, mine), np.where(is_odd, 0, wrong)).all())


def _token_first(index: Sequence[int], axes: str) -> tuple[int, ...]:
    """Return a sort key by which earlier tokens come first, wherever the token axis is."""
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
        return f"{name} has shape {mine.shape}; expected {expected.shape}{letters}{_why(mine, expected, axes)}"
    if not np.isfinite(mine).all():
        wrong = np.argwhere(~np.isfinite(mine))
        at = ", ".join(map(str, wrong[0].tolist()))
        what = f"{counted(len(wrong), 'number that is', 'numbers that are')} NaN or infinite"
        return f"{name} has {what}, first at [{at}]"
    return None


def _why(mine: NDArray[Any], expected: NDArray[Any], axes: str) -> str:
    """Return a likely reason for a wrong shape, or "" if there is none."""
    if axes != "*" and len(set(expected.shape)) == expected.ndim == mine.ndim:
        order = [expected.shape.index(size) for size in mine.shape if size in expected.shape]
        if len(set(order)) == expected.ndim:
            return f": the axes are in the order ({', '.join(axes[i] for i in order)})"
    if mine.size == expected.size and [n for n in mine.shape if n > 1] == [n for n in expected.shape if n > 1]:
        has_more = mine.ndim > expected.ndim
        return (
            ": remove the extra axis of size 1; there is no batch axis"
            if has_more
            else ": an axis of size 1 is missing"
        )
    if mine.size == expected.size:
        return ": the number of elements is right, the axes are not"
    return ""


def _value_problem(mine: Any, expected: Any) -> str | None:
    if isinstance(expected, list):
        has_bytes = bool(expected) and isinstance(expected[0], bytes)
        kind = "bytes" if has_bytes else "ids (int)"
        if not isinstance(mine, (list, tuple)):
            return f"returned {_kind(mine)}; expected a list of {kind}"
        odd = [item for item in mine if not (isinstance(item, bytes) if has_bytes else _is_whole(item))]  # pyright: ignore[reportUnknownVariableType]
        return f"returned a list that contains {_kind(odd[0])}; expected a list of {kind}" if odd else None
    if isinstance(mine, np.ndarray) and mine.ndim:
        return f"returned an array of shape {mine.shape}; expected one number"
    if isinstance(expected, int):
        return None if _is_whole(mine) else f"returned {_kind(mine)}; expected an id (int)"
    if isinstance(mine, bool) or not isinstance(mine, (float, int, np.number, np.ndarray)) or np.iscomplexobj(mine):
        return f"returned {_kind(mine)}; expected a number (float)"
    return None if np.isfinite(float(mine)) else f"returned {float(mine)}, which is not finite"


def _is_whole(item: Any) -> bool:
    if isinstance(item, np.ndarray):
        return item.ndim == 0 and item.dtype.kind in "iu"
    return isinstance(item, (int, np.integer)) and not isinstance(item, bool)


def where(found: Difference, arguments: str, layer: int | None, inside: bool) -> str:
    """Return a sentence about a difference.

    Args:
        found: The difference.
        arguments: The arguments, as `given` returns them.
        layer: Layer of the call, or None.
        inside: Whether the call was inside the model.
    """
    within = "inside the model" if inside else "on random numbers"
    if not found.output:
        return f"{arguments} ({within}): yours {_shown(found.yours)}, right {_shown(found.right)}"
    places = [] if layer is None else [f"layer {layer}"]
    names = _AXES | {"T": "position"} if inside else _AXES
    places += [f"{names[axis]} {number}" for axis, number in found.at.items() if axis in names]
    numbers = [str(number) for axis, number in found.at.items() if axis not in names]
    places += [f"number {', '.join(numbers)}"] if numbers else []
    at = ", ".join(places)
    return f"differs in {found.output} at {at} ({within}): yours {_shown(found.yours)}, right {_shown(found.right)}"


_AXES = {"T": "token", "N": "head", "K": "head", "S": "key", "L": "layer", "V": "id", "W": "weight"}


def given(names: Sequence[str], args: Sequence[Any]) -> str:
    """Return a phrase with the arguments other than arrays and functions, in Python's notation."""
    shown = [
        f"{name}={_shown(arg)}"
        for name, arg in zip(names, args, strict=True)
        if arg is None
        or (isinstance(arg, (bytes, int, float, list)) and not any(map(callable, arg if isinstance(arg, list) else ())))
    ]
    return f"for {', '.join(shown)}" if shown else "differs"


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"[:200]  # pyright: ignore[reportUnknownArgumentType]
    return f"{value:.6g}" if isinstance(value, float) else repr(value if isinstance(value, bytes) else plain(value))


def plain(value: Any) -> Any:
    """Return a value in types that JSON supports."""
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return value.item() if isinstance(value, (np.generic, np.ndarray)) else value


def _same_value(mine: Any, expected: Any) -> bool:
    if isinstance(expected, list):
        return [int(item) if isinstance(item, (np.integer, np.ndarray)) else item for item in mine] == expected
    if isinstance(expected, float):
        return abs(float(mine) - expected) <= RELATIVE * max(abs(expected), 1e-3)
    return int(mine) == expected


def _kind(value: Any) -> str:
    if value is None:
        return "None: is `return` missing?"
    kind = type(value).__name__
    article = "" if kind == "bytes" else "an " if kind[0] in "aeiou" else "a "
    return f"{article}{kind}" + (": did you mean `return` instead of `yield`?" if kind == "generator" else "")
