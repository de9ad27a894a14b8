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
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llamarium.attention import Context, attend_eagerly
from llamarium.errors import InputError, MemoryBudgetError
from llamarium.generation.kept import PREFILL_CHUNK, KeptSequence, Memory, batches
from llamarium.inspect.passes import as_tensor
from llamarium.inspect.shapes import axis_sizes, check_names, check_whole, indices, keys_of, make_key, split_key
from llamarium.inspect.tokens import check_ids
from llamarium.runtime.runner import DTYPE_BYTES, Cache, CacheDtype, Runner
from llamarium.runtime.taps import ACTIVATIONS, FROM_CACHE, Activation, Key, Taps

__all__ = ["ACTIVATIONS", "Activation", "Trace", "make_key", "split_key", "trace", "trace_steps"]

_EXACT_CHUNK = 256  # tokens of a batch where cutting a text changes no bit: bounds what a trace holds for a while


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
    known = check_ids(runner.config, ids)
    plan = _Plan.of(runner, len(known), names, layers, positions)
    plan.check_budget(budget_mb)
    memory = Memory(runner, len(known), kv_cache_dtype)
    return _run(runner, memory.cache, memory.begin(known, len(known), adapter), plan)


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
    _Plan.of(runner, room, names, layers, [room - 1]).check_budget(budget_mb)
    memory = Memory(runner, room)
    sequence = memory.begin(known, room)
    logits_1V: Any = None
    for batch in batches([sequence]):
        logits_1V = runner.run(batch, memory.cache)
    for _ in range(num_steps):
        sequence.ids.append(int(as_tensor(logits_1V)[-1].argmax()))  # sync: the token
        end = len(sequence.ids)
        wanted = ACTIVATIONS if names is None else {*check_names(names), "logits"}
        plan = _Plan.of(runner, end, wanted, layers, [end - 1])
        found = _run(runner, memory.cache, sequence, plan)
        logits_1V = found["logits"]
        yield found if names is None else found.select(names=names)


def _run(runner: Runner, cache: Cache, sequence: KeptSequence, plan: "_Plan") -> Trace:
    """Run what a sequence has not run yet, as a request would, and keep what the plan wants of it."""
    ordered = sorted(plan.positions)
    found, logits = dict[Key, list[Tensor]](), list[Tensor]()
    for batch in batches([sequence], plan.chunk):
        rows = [p - int(batch.positions[0]) for p in ordered if p in batch.positions]
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
    cache: Cache, sequence: KeptSequence, plan: "_Plan", layer: int, q_rot_TNH: Tensor | None
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


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is kept, decided and weighed before the run.

    Attributes:
        keys: The trace's keys, in the order of computation.
        positions: The tokens on the T axes.
        sizes: The length of each axis by its letter.
        itemsize: Bytes of a number in the dtype that the runner computes in.
        chunk: Tokens of a batch; all of them are handed out before those that are not wanted go.
    """

    keys: tuple[str, ...]
    positions: tuple[int, ...]
    sizes: Mapping[str, int]
    itemsize: int
    chunk: int

    @classmethod
    def of(
        cls,
        runner: Runner,
        num_tokens: int,
        names: Collection[str] | None,
        layers: Collection[int] | None,
        positions: Sequence[int] | None,
    ) -> "_Plan":
        c = runner.config
        kept = indices(positions, num_tokens, "positions")
        keys = keys_of(check_names(names), sorted(indices(layers, c.num_hidden_layers, "layers")))
        chunk = _EXACT_CHUNK if runner.is_row_exact else PREFILL_CHUNK  # PyTorch's bits hang on it
        return cls(keys, kept, axis_sizes(c, len(kept), num_tokens), DTYPE_BYTES[runner.dtype], chunk)

    @property
    def tapped(self) -> set[Key]:
        """What the runner has to hand out."""
        wanted = {split_key(key) for key in self.keys}
        queries = {("q_rot", layer) for name, layer in wanted if name in ("scores", "pattern")}
        return {key for key in wanted if key[0] not in (*FROM_CACHE, "logits")} | queries

    def wants(self, name: str, layer: int) -> bool:
        return make_key(name, layer) in self.keys

    def num_bytes(self, key: str) -> int:
        activation = ACTIVATIONS[split_key(key)[0]]
        return math.prod(self.sizes[a] for a in activation.axes) * (4 if activation.is_float32 else self.itemsize)

    def working_bytes(self) -> int:
        """What is there for a while: a batch's rows that are not wanted, one layer's mask, and `attend_eagerly`."""
        s = self.sizes
        others = max(0, min(self.chunk, s["S"]) - s["T"])
        batch = sum(self._row_bytes(name) for name, _ in self.tapped if ACTIVATIONS[name].axes[0] == "T") * others
        if not any(ACTIVATIONS[split_key(key)[0]].is_float32 for key in self.keys):
            return batch
        matrices = (1 + 2 * 4 * s["N"]) * s["T"] * s["S"]
        keys_and_values = 2 * 4 * s["S"] * s["N"] * s["H"]
        return batch + matrices + keys_and_values

    def _row_bytes(self, name: str) -> int:
        return math.prod(self.sizes[a] for a in ACTIVATIONS[name].axes[1:]) * self.itemsize

    def check_budget(self, budget_mb: float) -> None:
        by_name: dict[str, int] = {}
        for key in self.keys:
            name = split_key(key)[0]
            by_name[name] = by_name.get(name, 0) + self.num_bytes(key)
        needed = sum(by_name.values()) + self.working_bytes()
        if needed <= budget_mb * 1e6:
            return
        largest = sorted(by_name, key=lambda name: by_name[name], reverse=True)[:3]
        raise MemoryBudgetError(
            f"tracing {self.sizes['S']} tokens needs {needed / 1e6:,.1f} MB and the budget is {budget_mb:,.1f} MB; the "
            f"largest: {', '.join(f'{name} {by_name[name] / 1e6:,.1f} MB' for name in largest)}. "
            "Restrict names, layers or positions, or raise budget_mb"
        )


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
