"""NF4 weights as bitsandbytes saves them."""

import json
import math

import torch
from torch import Tensor

from llamarium.quant.nf4 import NF4, NF4_LEVELS, Linear4bit, dequantize_range
from llamarium.quant.nf4_state import NESTED_BLOCK_SIZE, STATE_KEY


def dequantize_nf4(quantized: NF4, shape: tuple[int, ...], *, block_size: int = 64) -> Tensor:
    """Return the weights: `shape`, float32."""
    return dequantize_range(quantized, 0, math.prod(shape), block_size).view(shape)


def components_of(linear: Linear4bit) -> dict[str, Tensor]:
    """The components of a weight, by the names that `Linear4bit.from_state` reads; JSON byte for byte bitsandbytes'."""
    layout = linear.layout
    components = {"weight": linear.weight, "weight.absmax": linear.absmax, "weight.quant_map": NF4_LEVELS.clone()}
    fields = {
        "quant_type": "nf4",
        "blocksize": layout.block_size,
        "dtype": layout.dtype,
        "shape": list(layout.shape),
    }
    if linear.nested_offset is not None:
        assert linear.nested_absmax is not None and linear.nested_quant_map is not None
        components["weight.nested_absmax"] = linear.nested_absmax
        components["weight.nested_quant_map"] = linear.nested_quant_map
        fields |= {
            "nested_blocksize": NESTED_BLOCK_SIZE,
            "nested_dtype": "float32",
            "nested_offset": linear.nested_offset.item(),
        }
    components[STATE_KEY] = torch.tensor(list(json.dumps(fields).encode()), dtype=torch.uint8)
    return components
