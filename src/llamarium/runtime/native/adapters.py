"""Adapters for the C kernels: two small matrices beside each of some Linears. Never torch.

    y = gain * (W x + scale * b (a x))

with a gain for DoRA alone: the learned length of each row over the length that the row has. Every sequence of a batch
may have an adapter of its own, or none.
"""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamarium.kernels import native

LINEARS = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip
"""The Linears of a layer by C's names for them."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """The correction of one Linear; arrays are C-contiguous.

    Attributes:
        scale: What b (a x) is multiplied by.
        a: float32 (rank, in).
        b: float32 (out, rank).
        gain: float32 (out,), DoRA's; None without.
    """

    scale: float
    a: NDArray[np.float32]
    b: NDArray[np.float32]
    gain: NDArray[np.float32] | None = None

    def added_to(
        self, base_OX: NDArray[np.float32], low_OX: NDArray[Any], rows: NDArray[np.int64] | slice = slice(None)
    ) -> NDArray[np.float32]:
        """Return rows of W, or of W x, corrected by those of b a, or of b a x."""
        out_OX = base_OX + np.multiply(low_OX, self.scale, dtype=np.float32)
        return out_OX if self.gain is None else out_OX * self.gain[rows, None]


Adapter = Mapping[str, LowRank]
"""One adapter: the corrections by the Linears' names, such as `model.layers.0.self_attn.q_proj` or `lm_head`."""


def describe(adapters: Sequence[Adapter], num_layers: int) -> "ctypes.Array[native.CAdapter]":
    """Return adapters for C; what it refers to lives as long as the arrays and the result do."""
    return (native.CAdapter * len(adapters))(*(_adapter(adapter, num_layers) for adapter in adapters))


def _adapter(adapter: Adapter, num_layers: int) -> native.CAdapter:
    layers = (native.CLoraLayer * num_layers)()
    for layer in range(num_layers):
        for name, module in LINEARS.items():
            setattr(layers[layer], name, _lora(adapter.get(f"model.layers.{layer}.{module}")))
    return native.CAdapter(layers, _lora(adapter.get("lm_head")))


def _lora(found: LowRank | None) -> native.CLora:
    if found is None:
        return native.CLora()
    gain = None if found.gain is None else found.gain.ctypes.data
    return native.CLora(len(found.a), found.scale, found.a.ctypes.data, found.b.ctypes.data, gain)
