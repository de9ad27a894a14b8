"""Adapters as the C kernels take them: every sequence of a batch may have one of its own, or none. Never torch."""

import ctypes
from collections.abc import Sequence

from llamarium.kernels import native
from llamarium.runtime.adapter import LAYER_LINEARS, Adapter, LowRank


def describe(adapters: Sequence[Adapter], num_layers: int) -> "ctypes.Array[native.CAdapter]":
    """Return adapters for C; what it refers to lives as long as the arrays and the result do."""
    return (native.CAdapter * len(adapters))(*(_adapter(adapter, num_layers) for adapter in adapters))


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
