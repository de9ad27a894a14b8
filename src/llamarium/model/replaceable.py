"""Methods that a torch function mode may replace by a faster implementation, as training does with C kernels."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch.overrides import wrap_torch_function

_Method = TypeVar("_Method", bound=Callable[..., Any])


def replaceable(method: _Method) -> _Method:
    """Let the active torch function mode, if any, replace calls of the method, which defines the semantics."""
    wrapped = cast(Any, wrap_torch_function(_inputs)(method))
    wrapped.replaceable = method
    return wrapped


def _inputs(*arguments: Any, **_: Any) -> tuple[Any, ...]:
    return arguments[1:]
