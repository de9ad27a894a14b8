"""Cache of the page's forward passes and their activations. No torch at import.

A pass is determined by its ids, adapter and experiment, so it can be recomputed at any time to the same bits.
Activations are cached up to a number of bytes with LRU eviction, and evicted ones are recomputed in the request's
thread, one pass at a time. The KV cache of the newest pass is kept: a long text runs once, then only the requested
tokens, and for a text with a common prefix only the different tokens. A trace is split into batches of 64 tokens,
between which the engine's steps have priority (`kernels/step_priority.py`).
"""

import math
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from llamarium.config import ModelConfig
from llamarium.errors import MemoryBudgetError, QuestionError, UnknownNameError
from llamarium.inspect.numbers import Floats
from llamarium.inspect.trace import KeptPass, Trace
from llamarium.page.binary import Numbers
from llamarium.page.executor import EditedPass, Executor, Pass
from llamarium.runtime.taps import ACTIVATIONS, Key, axis_sizes
from llamarium.server.lifecycle.threads import check_wanted

BUDGET_MB = 256.0
"""Maximum size of a trace."""

MAX_PASSES = 64
MAX_KEPT_BYTES = 256 * 2**20
"""Maximum bytes of all cached activations, except the newest trace, which in float32 may be twice `BUDGET_MB`."""

MAX_PAST_BYTES = 512 * 2**20
"""Maximum bytes of the newest pass's KV cache: 4,000 tokens of an 8B model."""

_AHEAD_BYTES = 96 * 2**20
"""Maximum bytes computed in advance: after one layer the next is often requested."""

_OF_A_TOKEN = tuple(name for name, activation in ACTIVATIONS.items() if "S" not in activation.axes and name != "logits")
_GROUPS = (_OF_A_TOKEN, ("k", "v"), ("k_rot",), ("scores", "pattern"))
"""Groups of activations that are computed together if all of them are too large."""

Rows = range
"""Positions: all tokens, every n-th token, or one token."""

_Key = tuple[str, Key, Rows]  # a pass, an activation and its positions


class Passes:
    """Thread-safe LRU cache of passes and their activations.

    Args:
        max_passes: Maximum number of passes.
        max_bytes: Maximum bytes of their activations; the newest trace is always kept.
        max_past_bytes: Maximum bytes of the newest pass's KV cache.
    """

    def __init__(
        self, max_passes: int = MAX_PASSES, max_bytes: int = MAX_KEPT_BYTES, max_past_bytes: int = MAX_PAST_BYTES
    ) -> None:
        self._max_passes, self._max_bytes, self._max_past_bytes = max_passes, max_bytes, max_past_bytes
        self._passes = OrderedDict[str, Pass]()
        self._values = OrderedDict[_Key, Floats]()
        self.num_bytes = 0  # size of the cached activations
        self._newest: tuple[str, KeptPass | EditedPass] | None = None
        self._lock = threading.Lock()  # guards the two tables
        self._running = threading.Lock()  # held while a trace runs, one at a time

    def add(self, forward_pass: Pass) -> Pass:
        """Add a pass as the most recently used one, and return it."""
        with self._lock:
            self._passes[forward_pass.id] = forward_pass
            self._passes.move_to_end(forward_pass.id)
            while len(self._passes) > self._max_passes:
                self._passes.popitem(last=False)
        return forward_pass

    def find(self, pass_id: str) -> Pass:
        """Return a cached pass and mark it as most recently used; UnknownNameError if there is none."""
        with self._lock:
            if pass_id in self._passes:
                self._passes.move_to_end(pass_id)
                return self._passes[pass_id]
        raise UnknownNameError(
            "this pass is not known any more; request it again with its ids", code="unknown_pass", param="id"
        )

    def numbers(self, executor: Executor, forward_pass: Pass, name: str, layer: int | None, rows: Rows) -> Numbers:
        """Return an activation of a pass, which the executor runs if needed.

        `layer` None means all layers, with an axis L, or an activation outside of the layers; `rows` are the positions
        on the axis T.
        """
        activation = ACTIVATIONS[name]
        if not activation.in_layer or layer is not None:
            (values,) = self._all(executor, forward_pass, [(name, layer)], rows)
            view = values.view()  # the cached array is shared, so the view is read-only
            view.flags.writeable = False
            return Numbers(view, activation.axes)
        every = [(name, i) for i in range(executor.runner.config.num_hidden_layers)]
        return Numbers(np.stack(self._all(executor, forward_pass, every, rows)), f"L{activation.axes}")

    def trace(
        self, executor: Executor, forward_pass: Pass, names: Collection[str], layers: Collection[int], rows: Rows
    ) -> Trace:
        """Return activations as a `Trace`; `rows` are the positions on the axis T."""
        keys = [(name, layer) for name in names for layer in (layers if ACTIVATIONS[name].in_layer else (None,))]
        arrays = dict(zip(keys, self._all(executor, forward_pass, keys, rows), strict=True))
        return Trace(forward_pass.ids, tuple(rows), arrays)

    def _all(self, executor: Executor, forward_pass: Pass, keys: Sequence[Key], rows: Rows) -> list[Floats]:
        """Return the activations of these keys; missing ones are computed, by one thread at a time."""
        values_of = {key: values for key in keys if (values := self._look_up(forward_pass, key, rows)) is not None}
        if len(values_of) < len(keys):
            with self._running:
                check_wanted()
                missing = [key for key in keys if self._look_up(forward_pass, key, rows) is None]
                if missing:  # not computed by another thread in the meantime
                    layers = sorted({layer for _, layer in keys if layer is not None})
                    self._compute(
                        executor, forward_pass, list(dict.fromkeys(name for name, _ in missing)), layers, rows
                    )
                values_of = {key: self._look_up(forward_pass, key, rows) for key in keys} | values_of
        return [values for key in keys if (values := values_of[key]) is not None]

    def _look_up(self, forward_pass: Pass, key: Key, rows: Rows) -> Floats | None:
        every = range(len(forward_pass.ids))
        axis = ACTIVATIONS[key[0]].axes.find("T")
        for positions in (every,) if axis < 0 else (every, rows):
            with self._lock:
                values = self._values.get((forward_pass.id, key, positions))
                if values is not None:
                    self._values.move_to_end((forward_pass.id, key, positions))
            if values is not None:
                return values if positions == rows or axis < 0 else values.take(rows, axis)
        return None

    def _compute(
        self, executor: Executor, forward_pass: Pass, selected: Sequence[str], layers: Sequence[int], rows: Rows
    ) -> None:
        """Trace the requested activations, and others that cost little in addition."""
        if self._newest is None or self._newest[0] != forward_pass.id:
            before, self._newest = self._newest, None
            self._newest = forward_pass.id, executor.begin(forward_pass, None if before is None else before[1])
        tracer, every = self._newest[1], range(len(forward_pass.ids))
        config, keeps_past = executor.runner.config, isinstance(tracer, KeptPass) and tracer.keeps_past
        names, kept_layers, kept_rows = _plan(config, len(every), selected, layers, rows, keeps_past=keeps_past)
        positions = None if kept_rows == every else list(kept_rows)
        options: dict[str, Any] = {
            "names": names,
            "layers": kept_layers,
            "positions": positions,
            "budget_mb": BUDGET_MB,
        }
        try:
            if isinstance(tracer, KeptPass):
                traced = tracer.trace(**options, known=self._beside(forward_pass))
            else:
                traced = tracer.trace(**options)
        except MemoryBudgetError as error:
            needs = str(error).partition(". ")[0]
            message = f"{needs}. Ask for one layer, for one position, or for every so many tokens (stride)"
            raise QuestionError(message, code="trace_too_large", param="stride") from None
        finally:
            if isinstance(tracer, KeptPass) and tracer.num_bytes > self._max_past_bytes:
                self._newest = None
        self._keep(forward_pass, traced, kept_rows)

    def _beside(self, forward_pass: Pass) -> Iterator[Trace]:
        """Yield the cached activations over all tokens of other passes with the same adapter and no experiment."""
        with self._lock:
            others = {
                other.id: other.ids
                for other in self._passes.values()
                if other.experiment is None and other.adapter_idx == forward_pass.adapter_idx and other != forward_pass
            }
            arrays_of = {id: dict[Key, Floats]() for id in others}
            for (id, key, rows), values in self._values.items():
                if id in others and rows == range(len(others[id])):
                    arrays_of[id][key] = values
        for id, arrays in arrays_of.items():
            yield Trace(others[id], tuple(range(len(others[id]))), arrays)

    def _keep(self, forward_pass: Pass, traced: Trace, rows: Rows) -> None:
        with self._lock:
            for key, values in traced.arrays.items():
                positions = rows if "T" in ACTIVATIONS[key[0]].axes else range(len(forward_pass.ids))
                self.num_bytes += values.nbytes - self._drop((forward_pass.id, key, positions))
                self._values[forward_pass.id, key, positions] = values
            newest = len(traced)
            while self.num_bytes > self._max_bytes and len(self._values) > newest:
                self.num_bytes -= self._drop(next(iter(self._values)))

    def _drop(self, key: _Key) -> int:
        values = self._values.pop(key, None)
        return 0 if values is None else values.nbytes


def _plan(
    config: ModelConfig,
    num_tokens: int,
    selected: Sequence[str],
    layers: Sequence[int],
    rows: Rows,
    *,
    keeps_past: bool,
) -> tuple[Sequence[str], list[int] | None, Rows]:
    """Return the names, layers and positions to trace: the requested ones, and more that cost little.

    Everything, if it takes little memory; otherwise other layers, as they cost no time. Other tokens cost no time only
    if the whole text runs anyway.
    """
    every, num_layers = range(num_tokens), config.num_hidden_layers
    all_names = [other for other in ACTIVATIONS if other != "logits"]
    if set(selected) <= set(all_names) and _bytes(config, num_tokens, all_names, None, every) <= _AHEAD_BYTES:
        return all_names, None, every
    group = next((names for names in _GROUPS if set(selected) <= set(names)), tuple(selected))
    beside = [rows] if keeps_past else [every, rows]
    for names, kept_rows in ((names, kept_rows) for kept_rows in beside for names in (group, tuple(selected))):
        most = _AHEAD_BYTES // _bytes(config, num_tokens, names, [0], kept_rows)
        around = _around(layers or range(num_layers), num_layers, most)
        if around is not None:
            return names, around, kept_rows
    return tuple(selected), list(layers) or None, rows


def _around(layers: Sequence[int], num_layers: int, most: int) -> list[int] | None:
    """Return up to `most` layers around the requested ones; None if the requested ones are too many."""
    first, end = min(layers), max(layers) + 1
    if most < end - first:
        return list(layers) if len(layers) <= most else None
    begin = max(0, min(first - (most - (end - first)) // 2, num_layers - most))
    return list(range(begin, min(num_layers, begin + most)))


def _bytes(config: ModelConfig, num_tokens: int, names: Sequence[str], layers: Sequence[int] | None, rows: Rows) -> int:
    sizes = {"T": len(rows), "S": num_tokens, **axis_sizes(config)}
    count = config.num_hidden_layers if layers is None else len(layers)
    each = [(ACTIVATIONS[name].axes, count if ACTIVATIONS[name].in_layer else 1) for name in names]
    return sum(4 * times * math.prod(sizes[axis] for axis in axes) for axes, times in each)
