"""The glass box: a pass of the real model, with what it computed on the way.

`trace` runs the runner that answers requests, as it answers them, and takes what it hands out (`runtime/taps.py`): the
same pass, the same bits, the same logits, be it C or the modules. Scores and patterns, which no fused kernel ever
holds, are recomputed from the very queries, and from the keys that the cache holds. A single step of decoding can be
traced like a prompt, from the cache of the answer that is being made (`trace_steps`).

`ACTIVATIONS` names everything that can be seen. A trace of everything is large (the pattern alone is N·T·T numbers a
layer), so what was asked for is weighed from the config before anything runs, and refused if it exceeds its budget.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llamarium.attention import Context, attend_eagerly
from llamarium.errors import InputError
from llamarium.generation.kept import KeptSequence, Memory, advance, batches
from llamarium.inspect.passes import as_tensor
from llamarium.inspect.shapes import TracePlan, check_names, check_whole, make_key, split_key
from llamarium.inspect.tokens import check_ids
from llamarium.runtime.batch import Batch, Span, pack
from llamarium.runtime.runner import Cache, CacheDtype, Runner
from llamarium.runtime.taps import ACTIVATIONS, FROM_CACHE, Activation, Key, Taps

__all__ = ["ACTIVATIONS", "Activation", "KeptPass", "Trace", "make_key", "split_key", "trace", "trace_steps"]


@dataclass(frozen=True, slots=True, eq=False)
class Trace(Mapping[str, Tensor]):
    """Activations by key, in the order of computation: "embed", "layers.0.attn_norm", ..., "logits".

    Attributes:
        token_ids: The ids that were run; their number is S.
        positions: The tokens that the T axes hold, in this order.
        activations: The tensors, on the model's device; shapes as `ACTIVATIONS` says.
    """

    token_ids: tuple[int, ...]
    positions: tuple[int, ...]
    activations: Mapping[str, Tensor]

    def __getitem__(self, key: str) -> Tensor:
        """Return one tensor; KeyError as for a dict."""
        return self.activations[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.activations)

    def __len__(self) -> int:
        return len(self.activations)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers of which there is something."""
        return tuple(sorted({layer for _, layer in map(split_key, self) if layer is not None}))

    def select(
        self,
        *,
        names: Collection[str] | None = None,
        layers: Collection[int] | None = None,
        positions: Sequence[int] | None = None,
    ) -> "Trace":
        """Return the part that `trace` would have returned for these arguments.

        Raises:
            InputError: For an unknown name, or a layer or position that this trace does not hold.
        """
        wanted = set(check_names(names))
        kept_layers = _among(layers, self.layers, "layers")
        kept_positions = _among(positions, self.positions, "positions")
        rows = None if positions is None else [self.positions.index(p) for p in kept_positions]
        part: dict[str, Tensor] = {}
        for key, tensor in self.items():
            name, layer = split_key(key)
            if name in wanted and (layer is None or layer in kept_layers):
                axis = ACTIVATIONS[name].axes.find("T")
                part[key] = tensor if rows is None or axis < 0 else _take(tensor, axis, rows)
        return Trace(self.token_ids, kept_positions, part)

    def to_dict(self) -> dict[str, Any]:
        """Return the same as JSON values; what is not finite (the -inf of `scores`) becomes None."""
        return {
            "token_ids": list(self.token_ids),
            "positions": list(self.positions),
            "activations": {
                key: {
                    "axes": list(ACTIVATIONS[split_key(key)[0]].axes),
                    "shape": list(tensor.shape),
                    "dtype": str(tensor.dtype).removeprefix("torch."),
                    "values": _finite(tensor.tolist()),  # sync: to show
                }
                for key, tensor in self.items()
            },
        }


def trace(
    runner: Runner,
    ids: Sequence[int] | Tensor,
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
        names: Of `ACTIVATIONS`; all where left out.
        layers: Whose activations are kept; negative ones count from the last. All where left out.
        positions: The tokens whose activations are kept (as queries, where attention is meant); negative ones count
            from the last. All where left out. The last one's logits are those of `generate`, to the bit.
        budget_mb: What the trace may hold, in megabytes of 10^6 bytes.
        adapter: Which of the runner's adapters is used, -1 for none of them.
        kv_cache_dtype: What keys and values are kept in: "int8" traces the pass of an engine that keeps them so.

    Raises:
        InputError: For ids, names, layers or positions that there are not.
        ContextLengthError: If there are more ids than the context holds.
        MemoryBudgetError: If more than the budget is needed. Nothing has been run then.
    """
    one = KeptPass(runner, ids, adapter=adapter, kv_cache_dtype=kv_cache_dtype)
    return one.trace(names=names, layers=layers, positions=positions, budget_mb=budget_mb)


class KeptPass:
    """A pass of which more can be asked later: its keys and values stay, and only the tokens in question run again.

    What it returns has the bits of a `trace` of its own. So where a token's bits hang on its company
    (`Runner.is_row_exact`) nothing stays, and each question runs the whole text. For one thread at a time.

    Attributes:
        keeps_past: Whether keys and values stay.

    Args:
        runner: As for `trace`.
        ids: As well.
        adapter: As well.
        kv_cache_dtype: As well.

    Raises:
        InputError: As `trace`.
        ContextLengthError: As `trace`.
    """

    def __init__(
        self, runner: Runner, ids: Sequence[int] | Tensor, *, adapter: int = -1, kv_cache_dtype: CacheDtype = "auto"
    ) -> None:
        self._runner, self._ids = runner, check_ids(runner.config, ids)
        self.keeps_past = runner.is_row_exact
        self._adapter: int = adapter
        self._kv_cache_dtype: CacheDtype = kv_cache_dtype
        self._kept: tuple[Cache, KeptSequence] | None = None

    @property
    def num_bytes(self) -> int:
        """What stays between two questions."""
        return 0 if self._kept is None else self._kept[0].num_bytes

    def trace(
        self,
        *,
        names: Collection[str] | None = None,
        layers: Collection[int] | None = None,
        positions: Sequence[int] | None = None,
        budget_mb: float = 1024,
    ) -> Trace:
        """Return what `trace` would, for the same arguments and with its errors."""
        plan = TracePlan.of(self._runner, len(self._ids), names, layers, positions)
        plan.check_budget(budget_mb)
        if self._kept is None:
            memory = Memory(self._runner, len(self._ids), self._kv_cache_dtype)
            sequence = memory.begin(self._ids, len(self._ids), self._adapter)
            if plan.runs_every_token:
                found = _run(self._runner, memory.cache, sequence, plan, batches([sequence], plan.chunk))
            else:
                advance(self._runner, memory.cache, [sequence], plan.chunk)
                found = _run(self._runner, memory.cache, sequence, plan, _again(sequence, plan))
            if self.keeps_past:
                self._kept = memory.cache, sequence
            return found
        return _run(self._runner, *self._kept, plan, _again(self._kept[1], plan))


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
        budget_mb: What one trace may hold.

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
    TracePlan.of(runner, room, names, layers, [room - 1]).check_budget(budget_mb)
    memory = Memory(runner, room)
    sequence = memory.begin(known, room)
    logits_1V: Any = None
    for batch in batches([sequence]):
        logits_1V = runner.run(batch, memory.cache)
    for _ in range(num_steps):
        sequence.ids.append(int(as_tensor(logits_1V)[-1].argmax()))  # sync: the token
        end = len(sequence.ids)
        wanted = ACTIVATIONS if names is None else {*check_names(names), "logits"}
        plan = TracePlan.of(runner, end, wanted, layers, [end - 1])
        found = _run(runner, memory.cache, sequence, plan, batches([sequence], plan.chunk))
        logits_1V = found["logits"]
        yield found if names is None else found.select(names=names)


def _again(sequence: KeptSequence, plan: TracePlan) -> Iterator[Batch]:
    """Yield batches of those tokens of a sequence that has been run which the plan wants to see once more."""
    wanted = list(range(len(sequence.ids))) if plan.runs_every_token else sorted(plan.positions)
    if not plan.tapped and "logits" not in plan.keys:
        wanted = []  # the cache holds what is asked for
    for begin in range(0, len(wanted), plan.chunk):
        spans = list[Span]()
        for _, run in groupby(enumerate(wanted[begin : begin + plan.chunk]), lambda place: place[1] - place[0]):
            positions = [position for _, position in run]
            ids = sequence.ids[positions[0] : positions[-1] + 1]
            spans.append(Span(ids, positions[0], sequence.table.blocks, num_logits=0, adapter=sequence.adapter))
        yield pack(spans)


def _run(runner: Runner, cache: Cache, sequence: KeptSequence, plan: TracePlan, steps: Iterator[Batch]) -> Trace:
    """Run batches of a sequence's tokens, as a request would, and keep what the plan wants of them."""
    ordered = sorted(plan.positions)
    found, logits = dict[Key, list[Tensor]](), list[Tensor]()
    for batch in steps:
        row_of = {position: row for row, position in enumerate(batch.positions.tolist())}
        rows = [row_of[p] for p in ordered if p in row_of]
        if "logits" in plan.keys:
            batch = replace(batch, logit_rows=np.array(rows, np.int32))
        taps = Taps(plan.tapped)
        logits.append(as_tensor(runner.run(batch, cache, taps)))
        for key, seen in _seen(taps):  # what is not wanted of it goes before the next batch
            has_all = ACTIVATIONS[key[0]].axes[0] == "S" or rows == list(range(len(seen)))
            found.setdefault(key, []).append(seen if has_all else _take(seen, 0, rows))
    tapped = {key: parts[0] if len(parts) == 1 else torch.cat(parts) for key, parts in found.items()}
    order = [ordered.index(p) for p in plan.positions]
    kept: dict[str, Tensor] = {}
    for key in plan.keys:
        name, layer = split_key(key)
        if name == "logits":
            kept[key] = _in_order(torch.cat(logits), order)
        elif name not in FROM_CACHE:
            seen = tapped[name, layer]
            kept[key] = seen if ACTIVATIONS[name].axes[0] == "S" else _in_order(seen, order)
        elif key not in kept:
            assert layer is not None
            q_rot = tapped.get(("q_rot", layer))
            kept |= _from_cache(cache, sequence, plan, layer, None if q_rot is None else _in_order(q_rot, order))
    return Trace(tuple(sequence.ids), plan.positions, {key: kept[key] for key in plan.keys})


def _seen(taps: Taps) -> Iterator[tuple[Key, Tensor]]:
    """Yield what a batch has handed out, (M, ...) each.

    Raises:
        InputError: If something that was wanted was not computed.
    """
    if unseen := sorted({key[0] for key, values in taps.kept.items() if not values}):
        raise InputError(
            f"{', '.join(unseen)}: the modules that compute them were not called (a patched forward?); leave them out"
        )
    for key, values in taps.kept.items():
        yield key, as_tensor(values[0]) if len(values) == 1 else torch.cat([as_tensor(part) for part in values])


def _in_order(rows: Tensor, order: Sequence[int]) -> Tensor:
    return rows if list(order) == list(range(len(rows))) else _take(rows, 0, order)


def _from_cache(
    cache: Cache, sequence: KeptSequence, plan: TracePlan, layer: int, q_rot_TNH: Tensor | None
) -> dict[str, Tensor]:
    """Return a layer's rotated keys, scores and pattern, as far as they are wanted."""
    k_SKH, v_SKH = map(as_tensor, cache.read(layer, sequence.table.blocks, len(sequence.ids)))
    found = {make_key("k_rot", layer): k_SKH}
    if q_rot_TNH is not None and (plan.wants("scores", layer) or plan.wants("pattern", layer)):
        positions_T1 = torch.tensor(plan.positions, device=k_SKH.device).unsqueeze(1)
        visible_1TS = (torch.arange(len(k_SKH), device=k_SKH.device) <= positions_T1).unsqueeze(0)
        context = Context(k_SKH.unsqueeze(0), v_SKH.unsqueeze(0), visible_1TS)
        seen = attend_eagerly(q_rot_TNH.unsqueeze(0), context)
        found[make_key("scores", layer)] = seen.scores_BNTS[0]
        found[make_key("pattern", layer)] = seen.pattern_BNTS[0]
    return {key: tensor for key, tensor in found.items() if key in plan.keys}


def _among(wanted: Collection[int] | None, held: tuple[int, ...], what: str) -> tuple[int, ...]:
    if wanted is None:
        return held
    check_whole(wanted, what)
    if not set(wanted) <= set(held):
        raise InputError(f"{what} are {list(wanted)}; this trace holds {list(held)}")
    return tuple(dict.fromkeys(wanted))


def _take(tensor: Tensor, axis: int, rows: Sequence[int]) -> Tensor:
    return tensor.index_select(axis, torch.tensor(rows, dtype=torch.int64, device=tensor.device))


def _finite(values: Any) -> Any:
    if isinstance(values, list):
        return [_finite(value) for value in values]
    return values if math.isfinite(values) else None
