"""The glass box: a pass of the real model, with what it computed on the way.

`trace` runs the runner that answers requests and takes what it hands out (`runtime/taps.py`): the same pass, the same
bits, the same logits, in C or in modules. Scores and patterns, which no fused kernel ever holds, are recomputed from
the same queries, and from the keys in the cache. A single step of decoding can be traced like a prompt, from the
answer's own cache (`trace_steps`). Arrays are numpy's; a `Trace` gives tensors by public name.

`ACTIVATIONS` names everything that can be traced. A trace of everything is large (the pattern alone is N·T·T numbers a
layer), so its size is computed from the config first, and refused if it exceeds the budget.
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
from llamarium.kernels.turns import pause
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
        token_ids: The ids of the text, S of them.
        positions: The tokens that the T axes hold, in this order.
        arrays: float32 arrays by (name, layer); shapes as `ACTIVATIONS` says.
    """

    token_ids: tuple[int, ...]
    positions: tuple[int, ...]
    arrays: Mapping[Key, Floats]

    def __getitem__(self, name: str) -> "Tensor":
        """Return one activation as a tensor over the array's memory, on the CPU.

        Raises:
            KeyError: As of a dict.
            OptionError: If PyTorch is not installed; `arrays` has the numbers without it.
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
        """The layers of which there is something."""
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
        wanted = set(check_names(names))
        kept_layers = _among(layers, self.layers, "layers")
        kept_positions = _among(positions, self.positions, "positions")
        rows = None if positions is None else [self.positions.index(p) for p in kept_positions]
        part: dict[Key, Floats] = {}
        for (name, layer), values in self.arrays.items():
            if name in wanted and (layer is None or layer in kept_layers):
                axis = ACTIVATIONS[name].axes.find("T")
                part[name, layer] = values if rows is None or axis < 0 else values.take(rows, axis)
        return Trace(self.token_ids, kept_positions, part)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values; what is not finite (the -inf of `scores`) becomes None."""
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
    """Run one text through the model and keep what it computed.

    Args:
        runner: Executes the model.
        ids: The token ids of one text, BOS included if the model expects one.
        names: Of `ACTIVATIONS`; None for all.
        layers: Whose activations are kept; negative ones count from the last. None for all.
        positions: The tokens whose activations are kept (as queries, where attention is meant); negative ones count
            from the last. None for all. The last one's logits are those of `generate`, to the bit.
        budget_mb: Limit of the trace's size, in megabytes of 10^6 bytes.
        adapter: Which of the runner's adapters is used, -1 for none of them.
        kv_cache_dtype: KV cache dtype: that of an engine traces the pass that it runs.

    Raises:
        InputError: For invalid ids, names, layers or positions.
        ContextLengthError: If there are more ids than the context holds.
        MemoryBudgetError: If the trace exceeds the budget. Nothing has been run then.
    """
    one = KeptPass(runner, ids, adapter=adapter, kv_cache_dtype=kv_cache_dtype)
    return one.trace(names=names, layers=layers, positions=positions, budget_mb=budget_mb)


class KeptPass:
    """A pass that can be traced repeatedly: its keys and values stay, and only the requested tokens run again.

    Its traces have the bits of `trace`. Where a token's bits depend on its batch (`Runner.is_row_exact`) nothing stays,
    and each trace runs the whole text. For one thread at a time; arguments and errors are those of `trace`.

    Args:
        after: A pass of the same runner that is not needed any more: keys and values of the tokens that both texts
            begin with are taken from it. Nothing is, where the runner, the adapter or the type of the cache differ.

    Attributes:
        keeps_past: Whether keys and values stay.
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
        """What keys and values depend on, but for the ids."""
        return id(self._runner), self._adapter, self._kv_cache_dtype

    @property
    def num_bytes(self) -> int:
        """The kept keys and values."""
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
        """Return what `trace` would, for the same arguments and with its errors.

        `known` are traces of all tokens of other texts, by the same runner and adapter. Of the tokens that this text
        begins with as one of them, only what that one lacks is run.
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
        wanted = range(first, num_tokens) if plan.runs_every_token else sorted(plan.positions)
        if list(wanted) == list(range(sequence.num_computed, num_tokens)):
            steps = batches([sequence], plan.chunk)
        else:
            if sequence.num_computed < num_tokens:
                advance(self._runner, memory.cache, [sequence], plan.chunk)
            steps = _again(sequence, plan, wanted)
        found = _run(self._runner, memory.cache, sequence, plan, steps, prefix)
        if self.keeps_past:
            self._kept = memory, sequence
        return found

    def _prefix(self, known: Iterable[Trace], plan: TracePlan, most: int) -> tuple[dict[Key, Floats], int]:
        """Return what is known of the tokens that this text begins with, and their number; the last one is run."""
        needed = plan.tapped | {("logits", None)} & set(plan.keys)
        if not self.keeps_past or plan.positions != tuple(range(len(self._ids))):
            return {}, 0
        lengths = [
            (num_shared(one.token_ids, self._ids[: min(most, len(self._ids) - 1)]), one)
            for one in known
            if needed <= one.arrays.keys()
        ]
        first, best = max(lengths, key=lambda one: one[0], default=(0, None))
        return {} if best is None or first == 0 else {key: best.arrays[key][:first] for key in needed}, first


def trace_steps(
    runner: Runner,
    ids: Sequence[int],
    num_steps: int,
    *,
    names: Collection[str] | None = None,
    layers: Collection[int] | None = None,
    budget_mb: float = 1024,
) -> Iterator[Trace]:
    """Follow a greedy answer token by token: a trace of each step of decoding, from the answer's own cache.

    Args:
        runner: Executes the model.
        ids: The prompt; it is run first, untraced.
        num_steps: How many tokens are chosen and run after it.
        names: As for `trace`.
        layers: As for `trace`.
        budget_mb: Limit of one trace's size.

    Yields:
        A trace whose one position is the token that was just run: "k" and "v" are its own, as nothing else was
        computed, and "k_rot", "scores" and "pattern" are over all tokens so far, which the cache holds.

    Raises:
        InputError: As `trace`.
        ContextLengthError: If prompt and steps are more than the context holds.
        MemoryBudgetError: As `trace`.
    """
    room = len(ids) + num_steps
    known = check_ids(runner.config, ids)
    check_ids(runner.config, [*known, *[0] * num_steps])  # whether the context holds the answer too
    plan_of = partial(TracePlan.of, runner.config, is_row_exact=runner.is_row_exact)
    plan_of(room, names, layers, [room - 1]).check_budget(budget_mb)
    memory = Memory(runner, room)
    sequence = memory.begin(known, room)
    logits_1V = as_array(advance(runner, memory.cache, [sequence]))
    for _ in range(num_steps):
        sequence.ids.append(int(logits_1V[-1].argmax()))
        end = len(sequence.ids)
        wanted = ACTIVATIONS if names is None else {*check_names(names), "logits"}
        plan = plan_of(end, wanted, layers, [end - 1])
        found = _run(runner, memory.cache, sequence, plan, batches([sequence], plan.chunk))
        logits_1V = found.arrays["logits", None]
        yield found if names is None else found.select(names=names)


def _again(sequence: KeptSequence, plan: TracePlan, wanted: Sequence[int]) -> Iterator[Batch]:
    """Yield batches of the wanted tokens of a computed sequence, if the plan has to run them again."""
    if not plan.tapped and ("logits", None) not in plan.keys:
        wanted = []  # the cache holds everything wanted
    for begin in range(0, len(wanted), plan.chunk):
        spans = list[Span]()
        for _, run in groupby(enumerate(wanted[begin : begin + plan.chunk]), lambda place: place[1] - place[0]):
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
    """Run batches of a sequence's tokens, as a request would, and keep the plan's part of them, behind a prefix."""
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
        for key, seen in _seen(taps):  # what is not wanted of it goes before the next batch
            has_all = ACTIVATIONS[key[0]].axes[0] == "S"
            parts.setdefault(key, []).append(seen if has_all else _rows(seen, rows))
    found = {key: some[0] if len(some) == 1 else np.concatenate(some) for key, some in parts.items()}
    order = [ordered.index(p) for p in plan.positions]
    found = {key: seen if ACTIVATIONS[key[0]].axes[0] == "S" else _rows(seen, order) for key, seen in found.items()}
    for layer in {layer for name, layer in plan.keys if name in FROM_CACHE and layer is not None}:
        pause()
        window = runner.config.sliding_window
        found |= _from_cache(cache, sequence, plan, layer, window, found.get(("q_rot", layer)))
    return Trace(tuple(sequence.ids), plan.positions, {key: found[key] for key in plan.keys})


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
    """Return the planned ones of a layer's rotated keys, scores and pattern."""
    k_SKH, _ = cache.read(layer, sequence.table.blocks, len(sequence.ids))
    found: dict[Key, Floats] = {("k_rot", layer): k_SKH} if ("k_rot", layer) in plan.keys else {}
    if q_rot_TNH is not None:
        visible_TS = causal_mask(np.array(plan.positions), len(k_SKH), window)
        found |= look(q_rot_TNH, k_SKH, visible_TS, layer, plan.keys)
    return found


def look(
    q_TNH: Floats, k_SKH: Floats, visible_TS: NDArray[np.bool_], layer: int, wanted: Collection[Key]
) -> dict[Key, Floats]:
    """Return the wanted ones of a layer's scores and pattern under a mask."""
    keys: list[Key] = [key for key in (("scores", layer), ("pattern", layer)) if key in wanted]
    if not keys:
        return {}
    scores_NTS = scores_of(q_TNH, k_SKH, visible_TS)
    return {key: scores_NTS if key[0] == "scores" else softmax(scores_NTS) for key in keys}


def _among(wanted: Collection[int] | None, held: tuple[int, ...], what: str) -> tuple[int, ...]:
    if wanted is None:
        return held
    check_whole(wanted, what)
    if not set(wanted) <= set(held):
        raise InputError(f"{what} are {list(wanted)}; this trace holds {list(held)}")
    return tuple(dict.fromkeys(wanted))


def _finite(values: Any) -> Any:
    if isinstance(values, list):
        return [_finite(value) for value in values]
    return values if math.isfinite(values) else None
