"""Adapters and edits as C structs. Torch-free."""

import ctypes
import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from llamarium.kernels import structs
from llamarium.runtime.adapter import LAYER_LINEARS, Adapter, LowRank
from llamarium.runtime.intervention import Edit


def describe(adapters: Sequence[Adapter], num_layers: int) -> "ctypes.Array[structs.CAdapter]":
    """Return adapters as C structs, which refer to the adapters' arrays."""
    empty = _adapter({}, num_layers)  # shared by all removed adapters, of which there may be thousands
    return (structs.CAdapter * len(adapters))(
        *(_adapter(adapter, num_layers) if adapter else empty for adapter in adapters)
    )


def _adapter(adapter: Adapter, num_layers: int) -> structs.CAdapter:
    layers = (structs.CLoraLayer * num_layers)()
    for layer in range(num_layers):
        for name, module in LAYER_LINEARS.items():
            setattr(layers[layer], name, _lora(adapter.get(f"model.layers.{layer}.{module}")))
    return structs.CAdapter(layers, _lora(adapter.get("lm_head")))


def _lora(correction: LowRank | None) -> structs.CLora:
    if correction is None:
        return structs.CLora()
    gain = None if correction.gain is None else correction.gain.ctypes.data
    return structs.CLora(len(correction.a), correction.scale, correction.a.ctypes.data, correction.b.ctypes.data, gain)


def describe_edits(edits: Sequence[tuple[Edit, ...]]) -> "ctypes.Array[structs.CEdits]":
    """Return each sequence's edits as C structs, which keep the memory that they refer to alive."""
    described = [_edits(sequence_edits) for sequence_edits in edits]
    all_edits = (structs.CEdits * len(edits))(*(sequence_edits for sequence_edits, _ in described))
    all_edits.kept = [memory for _, memory in described]  # pyright: ignore[reportAttributeAccessIssue]
    return all_edits


@functools.lru_cache(maxsize=256)  # a sequence has the same edits in every step
def _edits(edits: tuple[Edit, ...]) -> tuple[structs.CEdits, list[object]]:
    """Return edits as a C struct, and the memory that it refers to."""
    memory: list[object] = []

    def address(array: NDArray[np.generic] | None) -> int | None:
        memory.append(array)
        return None if array is None else array.ctypes.data

    used_edits = [edit for edit in edits if edit.positions != ()]  # C would apply an empty list to all positions
    described = (structs.CEdit * len(used_edits))()
    for edit, described_edit in zip(used_edits, described, strict=True):
        places = np.array(edit.positions or (), np.int32)
        described_edit.part, described_edit.layer, described_edit.head = (
            structs.PARTS.index(edit.part),
            edit.layer or 0,
            edit.head or 0,
        )
        described_edit.factor, described_edit.add = edit.factor, address(edit.added())
        described_edit.num_positions, described_edit.positions = len(places), address(places)
    return structs.CEdits(len(used_edits), described), [*memory, described]
