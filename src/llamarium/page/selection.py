"""Select part of an activation by a query: a layer, a head, a token, a range of tokens, or every n-th token."""

from typing import Any

from numpy.typing import NDArray

from llamarium.config import ModelConfig
from llamarium.errors import QuestionError, UnknownNameError
from llamarium.page.binary import Numbers
from llamarium.page.executor import Executor, Pass
from llamarium.page.passes import Passes, Rows
from llamarium.page.schema.passes import ActivationQuery
from llamarium.runtime.taps import ACTIVATIONS


def select(passes: Passes, executor: Executor, forward_pass: Pass, name: str, query: ActivationQuery) -> Numbers:
    """Return the part of an activation that a query selects; QuestionError or UnknownNameError if there is none."""
    _check(executor.runner.config, forward_pass, name, query)
    values = passes.numbers(executor, forward_pass, name, query.layer, _rows(len(forward_pass.ids), query))
    return _cut(values, query)


def check_index(name: str, value: int | None, size: int) -> None:
    """Raise a QuestionError with the field's name for an index that is out of range."""
    if value is not None and not 0 <= value < size:
        raise QuestionError(f"{name} is {value}; expected 0 to {size - 1}", code="invalid_parameter", param=name)


def window_of(num_tokens: int, start: int, stop: int | None, stride: int) -> Rows:
    """Return the positions of every `stride`-th token from `start` to `stop`; QuestionError if there are none."""
    end = num_tokens if stop is None else stop
    check_index("start", start, num_tokens)
    if not start < end <= num_tokens:
        message = f"stop is {end}; expected {start + 1} to {num_tokens}"
        raise QuestionError(message, code="invalid_parameter", param="stop")
    return range(start, end, stride)


def _check(config: ModelConfig, forward_pass: Pass, name: str, query: ActivationQuery) -> None:
    if name not in ACTIVATIONS:
        message = f"there is no activation of this name; there are: {', '.join(ACTIVATIONS)}"
        raise UnknownNameError(message, code="unknown_activation", param="name")
    activation = ACTIVATIONS[name]
    if query.layer is not None and not activation.in_layer:
        raise _without(name, "layer", "is outside of the layers")
    if query.head is not None and not {"N", "K"} & set(activation.axes):
        raise _without(name, "head", f"has no heads, its axes are {activation.axes}")
    if query.position is not None and query.stride != 1:
        raise QuestionError("stride is given beside position, which is one token; give one", param="stride")
    _check_window(forward_pass, name, query)
    heads = config.num_attention_heads if "N" in activation.axes else config.num_key_value_heads
    check_index("layer", query.layer, config.num_hidden_layers)
    check_index("head", query.head, heads)
    check_index("position", query.position, len(forward_pass.ids))


def _check_window(forward_pass: Pass, name: str, query: ActivationQuery) -> None:
    for field in ("start", "stop"):
        if field not in query.model_fields_set:
            continue
        if "T" not in ACTIVATIONS[name].axes:
            raise _without(name, field, f"has no queries, its axes are {ACTIVATIONS[name].axes}")
        if query.position is not None:
            raise QuestionError(f"{field} is given beside position, which is one token; give one", param=field)
    window_of(len(forward_pass.ids), query.start, query.stop, query.stride)


def _without(name: str, field: str, why: str) -> QuestionError:
    return QuestionError(f"{field} is given, and {name} {why}; leave it out", code="invalid_parameter", param=field)


def _rows(num_tokens: int, query: ActivationQuery) -> Rows:
    if query.position is not None:
        return range(query.position, query.position + 1)
    return window_of(num_tokens, query.start, query.stop, query.stride)


def _cut(numbers: Numbers, query: ActivationQuery) -> Numbers:
    """Select the requested head and tokens; the axis T is already selected."""
    values: NDArray[Any] = numbers.values
    axes = numbers.axes
    for axis in ("N", "K"):
        if query.head is not None and axis in axes:
            values, axes = values.take(query.head, axes.index(axis)), axes.replace(axis, "")
    if query.position is not None:
        if "T" in axes:
            values, axes = values.take(0, axes.index("T")), axes.replace("T", "")
        else:
            values, axes = values.take(query.position, axes.index("S")), axes.replace("S", "")
    elif "S" in axes:
        values = values.take(range(0, values.shape[axes.index("S")], query.stride), axes.index("S"))
    return Numbers(values, axes, query.stride)
