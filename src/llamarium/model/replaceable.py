"""Methods that a torch function mode may compute otherwise, as `train/step.py` does in C; the method defines them."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch.overrides import wrap_torch_function

_Method = TypeVar("_Method", bound=Callable[..., Any])


def replaceable(method: _Method) -> _Method:
    """Show the method and its arguments to the mode that is active, if there is one."""
    shown = cast(Any, wrap_torch_function(_inputs)(method))
    shown.replaceable = method
    return shown


def _inputs(*given: Any, **_: Any) -> tuple[Any, ...]:
    return given[1:]
