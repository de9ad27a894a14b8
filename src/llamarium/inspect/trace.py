"""Traces: the activations of a forward pass.

`trace` uses the same runner as requests and collects the activations that it returns (`runtime/taps.py`), so the
logits are bit-identical to those of a request, in C or in PyTorch modules. Attention scores and weights, which fused
kernels do not store, are recomputed from the same queries and the keys in the cache. Decode steps can be traced too,
with the KV cache of the answer (`trace_steps`). Arrays are numpy's; a `Trace` returns tensors by public name.

`ACTIVATIONS` lists everything that can be traced. A full trace is large (the attention weights alone are N·T·T numbers
per layer), so its size is computed from the config first, and a trace over the budget is refused.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from numpy.typing import NDArray

from llamarium.errors import InputError, show_value
from llamarium.extras import need_torch
from llamarium.inspect.forward import KeptSequence, Memory, advance, batches, num_shared
from llamarium.inspect.numbers import Floats, as_array, causal_mask, scores_of, softmax
from llamarium.inspect.shapes import TracePlan, check_names, check_whole, parse_key, print_key
from llamarium.inspect.tokens import check_ids
from llamarium.kernels.step_priority import pause
from llamarium.runtime.batch import Batch, Span, pack
from llamarium.runtime.runner import Cache, CacheDtype, Runner
from llamarium.runtime.taps import ACTIVATIONS, FROM_CACHE, Activation, Key, Taps

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ACTIVATIONS", "Activation", "KeptPass", "Trace", "trace", "trace_steps"]


@dataclass(frozen=True, slots=True, eq=False)
class Trace(Mapping[str, "Tensor"]):
    """Activations by public name, in the order of computation: "embed", "layers.0.attn_norm", ..., "logits".

    Attributes:
        token_ids: Token ids of the text, S of them.
        positions: Positions of the tokens on the T axes, in order.
        arrays: float32 arrays by (name, layer); `ACTIVATIONS` has their axes.
    """

    token_ids: tuple[int, ...]
    positions: tuple[int, ...]
    arrays: Mapping[Key, Floats]

    def __getitem__(self, name: str) -> "Tensor":
        """Return one activation as a tensor on the CPU, which shares the array's memory.

        Raises:
            KeyError: If the trace has no such activation.
            OptionError: If PyTorch is not installed; use `arrays` then.
        """
        if name not in self:
            raise KeyError(name)
        need_torch("a tensor of a trace")
        import torch

        return torch.from_numpy(self.arrays[parse_key(name)])

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and parse_key(name) in self.arrays

    def __iter__(self) -> Iterator[str]:
        return map(print_key, self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers with an activation in the trace, sorted."""
        return tuple(sorted({layer for _, layer in self.arrays if layer is not None}))

    def select(
        self,
        *,
        names: Collection[str] | None = None,
        layers: Collection[int] | None = None,
        positions: Sequence[int] | None = None,
    ) -> "Trace":
        """Return the part that `trace` would have returned for these arguments.

        InputError for an unknown name, or a layer or position that this trace does not hold.
        """
        selected = set(check_names(names))
        kept_layers = _among(layers, self.layers, "layers")
        kept_positions = _among(positions, self.positions, "positions")
        rows = None if positions is None else [self.positions.index(p) for p in kept_positions]
        part: dict[Key, Floats] = {}
        for (name, layer), values in self.arrays.items():
            if name in selected and (layer is None or layer in kept_layers):
                axis = ACTIVATIONS[name].axes.find("T")
                part[name, layer] = values if rows is None or axis < 0 else values.take(rows, axis)
        return Trace(self.token_ids, kept_positions, part)

    def to_dict(self) -> dict[str, Any]:
        """Return the trace as JSON values; numbers that are not finite (the -inf of `scores`) become None."""
        return {
            "token_ids": list(self.token_ids),
            "positions": list(self.positions),
            "activations": {
                print_key(key): {
                    "axes": list(ACTIVATIONS[key[0]].axes),
                    "shape": list(values.shape),
                    "dtype": values.dtype.name,
                    "values": _finite(values.tolist()),
                }
                for key, values in self.arrays.items()
            },
        }


def trace(
    runner: Runner,
    ids: "Sequence[int] | Tensor",
    *,
    names: Collection[str] | None = None,
    layers: Collection[int] | None = None,
    positions: Sequence[int] | None = None,
    budget_mb: float = 1024,
    adapter: int = -1,
    kv_cache_dtype: CacheDtype = "auto",
) -> Trace:
    """Run one text through the model and return its activations.

    Args:
        runner: Executes the model.
        ids: Token ids of one text, including BOS if the model expects it.
        names: Names from `ACTIVATIONS`; None for all.
        layers: Layers to keep; negative ones count from the last. None for all.
        positions: Token positions to keep (as queries in attention); negative ones count from the last. None for all.
            The logits of the last position are bit-identical to those of `generate`.
        budget_mb: Maximum size of the trace, in megabytes of 10^6 bytes.
        adapter: Index of the runner's adapter, -1 for none.
        kv_cache_dtype: KV cache dtype; use an engine's to trace what it computes.

    Raises:
        InputError: For invalid ids, names, layers or positions.
        ContextLengthError: If there are more ids than the context length.
        MemoryBudgetError: If the trace would exceed the budget. Nothing is run then.
    """
    forward_pass = KeptPass(runner, ids, adapter=adapter, kv_cache_dtype=kv_cache_dtype)
    return forward_pass.trace(names=names, layers=layers, positions=positions, budget_mb=budget_mb)


class KeptPass:
    """A forward pass that can be traced repeatedly: it keeps its KV cache, and computes only the needed tokens again.

    Its traces are bit-identical to those of `trace`. If a token's bits depend on its batch (not `Runner.is_row_exact`),
    nothing is kept, and each trace runs the whole text. Not thread-safe. For other arguments and errors see `trace`.

    Args:
        after: A pass that is no longer needed, whose KV cache is reused for the common prefix of both texts, if
            runner, adapter and KV cache dtype are the same.

    Attributes:
        keeps_past: True if the KV cache is kept.
    """

    def __init__(
        self,
        runner: Runner,
        ids: "Sequence[int] | Tensor",
        *,
        adapter: int = -1,
        kv_cache_dtype: CacheDtype = "auto",
        after: "KeptPass | None" = None,
    ) -> None:
        if kv_cache_dtype not in get_args(CacheDtype):
            expected = ", ".join(get_args(CacheDtype))
            raise InputError(f"kv_cache_dtype is {show_value(kv_cache_dtype)}; expected {expected}")
        num_adapters = len(runner.adapters or ())
        if adapter not in range(-1, num_adapters):
            raise InputError(f"adapter is {show_value(adapter)}; expected one below {num_adapters}, or -1")
        self._runner, self._ids = runner, check_ids(runner.config, ids)
        self.keeps_past = runner.is_row_exact
        self._adapter: int = adapter
        self._kv_cache_dtype: CacheDtype = kv_cache_dtype
        self._kept: tuple[Memory, KeptSequence] | None = None
        if after is not None and after._kept is not None and after._how == self._how:
            (memory, sequence), after._kept = after._kept, None
            memory.change(sequence, self._ids)
            self._kept = memory, sequence

    @property
    def _how(self) -> tuple[object, ...]:
        """Everything except the ids that keys and values depend on."""
        return id(self._runner), self._adapter, self._kv_cache_dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the kept KV cache."""
        return 0 if self._kept is None else self._kept[0].cache.num_bytes

    def trace(
        self,
        *,
        names: Collection[str] | None = None,
        layers: Collection[int] | None = None,
        positions: Sequence[int] | None = None,
        budget_mb: float = 1024,
        known: Iterable[Trace] = (),
    ) -> Trace:
        """Return the trace; arguments and errors as for the function `trace`.

        `known` are full traces of other texts, by the same runner and adapter. Their activations are reused for a
        common prefix with this text.
        """
        num_tokens = len(self._ids)
        runner = self._runner
        plan = TracePlan.of(runner.config, num_tokens, names, layers, positions, is_row_exact=runner.is_row_exact)
        plan.check_budget(budget_mb)
        if self._kept is None:
            memory = Memory(self._runner, num_tokens, self._kv_cache_dtype)
            sequence = memory.begin(self._ids, num_tokens, self._adapter)
        else:
            memory, sequence = self._kept
        prefix, first = self._prefix(known, plan, sequence.num_computed)
        computed = range(first, num_tokens) if plan.runs_every_token else sorted(plan.positions)
        if list(computed) == list(range(sequence.num_computed, num_tokens)):
            steps = batches([sequence], plan.chunk)
        else:
            if sequence.num_computed < num_tokens:
                advance(self._runner, memory.cache, [sequence], plan.chunk)
            steps = _again(sequence, plan, computed)
        traced = _run(self._runner, memory.cache, sequence, plan, steps, prefix)
        if self.keeps_past:
            self._kept = memory, sequence
        return traced

    def _prefix(self, candidates: Iterable[Trace], plan: TracePlan, limit: int) -> tuple[dict[Key, Floats], int]:
        """Return the known activations of the longest common prefix, and its length; excludes the last token."""
        keys = plan.tapped | {("logits", None)} & set(plan.keys)
        if not self.keeps_past or plan.positions != tuple(range(len(self._ids))):
            return {}, 0
        lengths = [
            (num_shared(candidate.token_ids, self._ids[: min(limit, len(self._ids) - 1)]), candidate)
            for candidate in candidates
            if keys <= candidate.arrays.keys()
        ]
        first, best = max(lengths, key=lambda pair: pair[0], default=(0, None))
        return {} if best is None or first == 0 else {key: best.arrays[key][:first] for key in keys}, first


def trace_steps(
    runner: Runner,
    ids: Sequence[int],
    num_steps: int,
    *,
    names: Collection[str] | None = None,
    layers: Collection[int] | None = None,
    budget_mb: float = 1024,
) -> Iterator[Trace]:
    """Yield a trace of each decode step of a greedy answer.

    Args:
        runner: Executes the model.
        ids: Token ids of the prompt, which is computed first and not traced.
        num_steps: Number of tokens to generate.
        names: As for `trace`.
        layers: As for `trace`.
        budget_mb: Maximum size of one trace, in megabytes of 10^6 bytes.

    Yields:
        A trace whose only position is the new token. "k" and "v" are those of this token; "k_rot", "scores" and
        "pattern" cover all tokens so far, from the cache.

    Raises:
        InputError: As `trace`.
        ContextLengthError: If the prompt and the steps exceed the context length.
        MemoryBudgetError: As `trace`.
    """
    room = len(ids) + num_steps
    prompt_ids = check_ids(runner.config, ids)
    check_ids(runner.config, [*prompt_ids, *[0] * num_steps])  # checks that the answer fits into the context
    plan_of = partial(TracePlan.of, runner.config, is_row_exact=runner.is_row_exact)
    plan_of(room, names, layers, [room - 1]).check_budget(budget_mb)
    memory = Memory(runner, room)
    sequence = memory.begin(prompt_ids, room)
    logits_1V = as_array(advance(runner, memory.cache, [sequence]))
    for _ in range(num_steps):
        sequence.ids.append(int(logits_1V[-1].argmax()))
        end = len(sequence.ids)
        traced_names = ACTIVATIONS if names is None else {*check_names(names), "logits"}
        plan = plan_of(end, traced_names, layers, [end - 1])
        traced = _run(runner, memory.cache, sequence, plan, batches([sequence], plan.chunk))
        logits_1V = traced.arrays["logits", None]
        yield traced if names is None else traced.select(names=names)


def _again(sequence: KeptSequence, plan: TracePlan, recomputed: Sequence[int]) -> Iterator[Batch]:
    """Yield batches that recompute tokens of a sequence, if the plan needs more than the cache."""
    if not plan.tapped and ("logits", None) not in plan.keys:
        recomputed = []  # everything comes from the cache
    for begin in range(0, len(recomputed), plan.chunk):
        spans = list[Span]()
        for _, run in groupby(enumerate(recomputed[begin : begin + plan.chunk]), lambda place: place[1] - place[0]):
            positions = [position for _, position in run]
            ids = sequence.ids[positions[0] : positions[-1] + 1]
            spans.append(Span(ids, positions[0], sequence.table.blocks, num_logits=0, adapter=sequence.adapter))
        yield pack(spans)


def _run(
    runner: Runner,
    cache: Cache,
    sequence: KeptSequence,
    plan: TracePlan,
    steps: Iterator[Batch],
    prefix: Mapping[Key, Floats] | None = None,
) -> Trace:
    """Run batches of a sequence, and return the planned activations, after those of a known prefix."""
    ordered = sorted(plan.positions)
    parts: dict[Key, list[Floats]] = {key: [values] for key, values in (prefix or {}).items()}
    for batch in steps:
        row_of = {position: row for row, position in enumerate(batch.positions.tolist())}
        rows = [row_of[p] for p in ordered if p in row_of]
        taps, wants_logits = Taps(plan.tapped), ("logits", None) in plan.keys
        if wants_logits:
            batch = replace(batch, logit_rows=np.array(rows, np.int32))
        logits_WV = as_array(runner.run(batch, cache, taps))
        if wants_logits:
            parts.setdefault(("logits", None), []).append(logits_WV)
        for key, array in _seen(taps):  # unneeded rows are freed before the next batch
            has_all = ACTIVATIONS[key[0]].axes[0] == "S"
            parts.setdefault(key, []).append(array if has_all else _rows(array, rows))
    arrays = {key: some[0] if len(some) == 1 else np.concatenate(some) for key, some in parts.items()}
    order = [ordered.index(p) for p in plan.positions]
    arrays = {
        key: array if ACTIVATIONS[key[0]].axes[0] == "S" else _rows(array, order) for key, array in arrays.items()
    }
    for layer in {layer for name, layer in plan.keys if name in FROM_CACHE and layer is not None}:
        pause()
        window = runner.config.sliding_window
        arrays |= _from_cache(cache, sequence, plan, layer, window, arrays.get(("q_rot", layer)))
    return Trace(tuple(sequence.ids), plan.positions, {key: arrays[key] for key in plan.keys})


def _seen(taps: Taps) -> Iterator[tuple[Key, Floats]]:
    """Yield the activations of a batch, (M, ...) each; InputError if one was not computed."""
    if unseen := sorted({key[0] for key, values in taps.kept.items() if not values}):
        raise InputError(
            f"{', '.join(unseen)}: the modules that compute them were not called (a patched forward?); leave them out"
        )
    for key, values in taps.kept.items():
        yield key, values[0] if len(values) == 1 else np.concatenate(values)


def _rows(values: Floats, rows: Sequence[int]) -> Floats:
    return values if list(rows) == list(range(len(values))) else values.take(rows, 0)


def _from_cache(
    cache: Cache, sequence: KeptSequence, plan: TracePlan, layer: int, window: int | None, q_rot_TNH: Floats | None
) -> dict[Key, Floats]:
    """Return those of a layer's rotated keys, attention scores and attention weights that are planned."""
    k_SKH, _ = cache.read(layer, sequence.table.blocks, len(sequence.ids))
    arrays: dict[Key, Floats] = {("k_rot", layer): k_SKH} if ("k_rot", layer) in plan.keys else {}
    if q_rot_TNH is not None:
        visible_TS = causal_mask(np.array(plan.positions), len(k_SKH), window)
        arrays |= look(q_rot_TNH, k_SKH, visible_TS, layer, plan.keys)
    return arrays


def look(
    q_TNH: Floats, k_SKH: Floats, visible_TS: NDArray[np.bool_], layer: int, selected: Collection[Key]
) -> dict[Key, Floats]:
    """Return a layer's attention scores and attention weights under a mask, if `selected`."""
    keys: list[Key] = [key for key in (("scores", layer), ("pattern", layer)) if key in selected]
    if not keys:
        return {}
    scores_NTS = scores_of(q_TNH, k_SKH, visible_TS)
    return {key: scores_NTS if key[0] == "scores" else softmax(scores_NTS) for key in keys}


def _among(selected: Collection[int] | None, available: tuple[int, ...], subject: str) -> tuple[int, ...]:
    if selected is None:
        return available
    check_whole(selected, subject)
    if not set(selected) <= set(available):
        raise InputError(f"{subject} are {list(selected)}; this trace holds {list(available)}")
    return tuple(dict.fromkeys(selected))


def _finite(values: Any) -> Any:
    if isinstance(values, list):
        return [_finite(value) for value in values]
    return values if math.isfinite(values) else None
