"""Checks of a run's settings: the type of each, and its range."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Literal, cast, get_args, get_origin

from llamarium.errors import TrainingError, show_value

_LARGEST = 2**63  # of numbers that have no bound of their own
_HALF_PAIR = re.compile("[\ud800-\udfff]")  # a byte of the shell that is no UTF-8 comes as one; no TOML can hold it


def kind_of(hint: Any) -> Any:
    """Return an annotation without its `| None`."""
    kinds = get_args(hint) if get_origin(hint) is not Literal and get_args(hint) else (hint,)
    return next(kind for kind in kinds if kind is not type(None))


def check_setting(item: dataclasses.Field[Any], hint: Any, value: Any) -> None:
    """Check a setting's type and range; TrainingError names it, its value and what was expected."""
    low, high = item.metadata["low"], item.metadata["high"]
    if value is None and type(None) in get_args(hint):
        return
    kind = kind_of(hint)
    if item.name in ("data", "reward") and isinstance(value, Mapping):  # several sources or functions, and weights
        value = ", ".join(cast("Mapping[str, float]", value))
    if get_origin(kind) is Literal:
        fits, expected = value in get_args(kind), ", ".join(get_args(kind))
    elif kind in (int, float):
        least, most = -_LARGEST if low is None else low, _LARGEST if high is None else high  # NaN is not within
        fits = isinstance(value, int | kind) and not isinstance(value, bool) and least <= value <= most
        expected = ("a whole number" if kind is int else "a number") + ("" if low is None else f" from {low:g}")
        expected += " to 2^63" if high is None else f" to {high:g}"
    elif kind is bool:
        fits, expected = isinstance(value, bool), "true or false"
    else:
        fits = isinstance(value, str) and _HALF_PAIR.search(value) is None
        expected = "a text that is valid Unicode (rename a file whose name is not)"
    if not fits:
        raise TrainingError(f"{item.name} is {show_value(value)}; expected {expected}")
