"""Declaration of sampling parameters: options, and the interfaces that accept them. Never torch."""

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from llamarium.errors import SamplingError, show_value
from llamarium.options.declare import option

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

INF = math.inf

LogitsProcessor = Callable[["NDArray[np.int64]", "NDArray[np.float32]"], "NDArray[np.floating[Any]]"]
"""Takes the ids of prompt and answer so far, (T,), and the next token's logits, (V,); returns other logits, (V,)."""

Taker = Literal["cli", "openai", "responses", "anthropic", "page", "file"]
"""An interface that accepts parameters under their names here; "file" is `generation_config.json`."""

EVERYWHERE: tuple[Taker, ...] = ("cli", "openai", "responses", "anthropic", "page", "file")
BUT_ANTHROPIC: tuple[Taker, ...] = ("cli", "openai", "responses", "page", "file")
OF_PENALTIES: tuple[Taker, ...] = ("cli", "openai", "page")


def parameter(
    default: Any,
    text: str,
    *,
    takers: tuple[Taker, ...] = (),
    is_idle_when_greedy: bool = False,
    is_hashed: bool = True,
    **declaration: Any,
) -> Any:
    """Declare a field of `SamplingParams`.

    Args:
        default: Default value; a dict or list is copied.
        text: Help text, as of `option`.
        takers: Interfaces besides Python that accept it.
        is_idle_when_greedy: True if it has no effect at temperature 0.
        is_hashed: False if its values cannot be hashed.
        **declaration: Other arguments of `option`.
    """
    metadata = option(default, text, **declaration).metadata
    metadata = {**metadata, "takers": takers, "is_idle_when_greedy": is_idle_when_greedy}
    is_hashed_too = None if is_hashed else False
    if isinstance(default, dict):
        return dataclasses.field(default_factory=dict[Any, Any], hash=is_hashed_too, metadata=metadata)
    return dataclasses.field(default=default, hash=is_hashed_too, metadata=metadata)


def number(default: float, text: str, low: float, high: float, expected: str, **declaration: Any) -> Any:
    """Declare a parameter that is a number; `expected` is its range in words."""
    return parameter(default, text, low=low, high=high, words=f"a number, {expected}", **declaration)


def integer(default: int | None, text: str, low: int, high: float = INF, **declaration: Any) -> Any:
    """Declare a parameter that is an integer; None as the default makes it optional."""
    expected = f"at least {low}" if high == INF else f"{low} to {high}"
    return parameter(default, text, low=low, high=high, words=f"a whole number, {expected}", **declaration)


def check_number(name: str, value: object, low: float, high: float, expected: str) -> None:
    """Raise SamplingError unless a value is a number in the range, which `expected` describes."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:  # false for NaN
        raise SamplingError(f"{name} is {show_value(value)}; expected a number, {expected}")


def check_integer(name: str, value: object, low: float, high: float, expected: str) -> None:
    """Raise SamplingError unless a value is an integer in the range, which `expected` describes."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise SamplingError(f"{name} is {show_value(value)}; expected a whole number, {expected}")
