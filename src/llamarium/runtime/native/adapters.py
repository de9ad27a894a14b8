"""Adapters and edits as the C kernels take them: each sequence of a batch has its own, or none. Never torch."""

import ctypes
import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from llamarium.kernels import native
from llamarium.runtime.adapter import LAYER_LINEARS, Adapter, LowRank
from llamarium.runtime.intervention import Edit


def describe(adapters: Sequence[Adapter], num_layers: int) -> "ctypes.Array[native.CAdapter]":
    """Return adapters for C; what it refers to lives as long as the arrays and the result do."""
    empty = _adapter({}, num_layers)  # one for all that have gone, of which there may be thousands
    return (native.CAdapter * len(adapters))(*(_adapter(one, num_layers) if one else empty for one in adapters))


def _adapter(adapter: Adapter, num_layers: int) -> native.CAdapter:
    layers = (native.CLoraLayer * num_layers)()
    for layer in range(num_layers):
        for name, module in LAYER_LINEARS.items():
            setattr(layers[layer], name, _lora(adapter.get(f"model.layers.{layer}.{module}")))
    return native.CAdapter(layers, _lora(adapter.get("lm_head")))


def _lora(found: LowRank | None) -> native.CLora:
    if found is None:
        return native.CLora()
    gain = None if found.gain is None else found.gain.ctypes.data
    return native.CLora(len(found.a), found.scale, found.a.ctypes.data, found.b.ctypes.data, gain)


def describe_edits(edits: Sequence[tuple[Edit, ...]]) -> "ctypes.Array[native.CEdits]":
    """Return each sequence's edits for C; what it refers to lives as long as the result does."""
    described = [_edits(own) for own in edits]
    found = (native.CEdits * len(edits))(*(own for own, _ in described))
    found.kept = [kept for _, kept in described]  # pyright: ignore[reportAttributeAccessIssue]
    return found


@functools.lru_cache(maxsize=256)  # an answer has the same ones in every step
def _edits(edits: tuple[Edit, ...]) -> tuple[native.CEdits, list[object]]:
    """Return edits for C, and the memory that they refer to."""
    kept: list[object] = []

    def address(array: NDArray[np.generic] | None) -> int | None:
        kept.append(array)
        return None if array is None else array.ctypes.data

    some = [edit for edit in edits if edit.positions != ()]  # of none: for C that is all
    described = (native.CEdit * len(some))()
    for edit, own in zip(some, described, strict=True):
        places = np.array(edit.positions or (), np.int32)
        own.part, own.layer, own.head = native.PARTS.index(edit.part), edit.layer or 0, edit.head or 0
        own.factor, own.add = edit.factor, address(edit.added())
        own.num_positions, own.positions = len(places), address(places)
    return native.CEdits(len(some), described), [*kept, described]
