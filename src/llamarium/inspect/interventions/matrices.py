"""The matrix that a Linear multiplies with, whatever it is stored as."""

import torch
from torch import Tensor, nn

from llamarium.adapters.lora import LoRALinear
from llamarium.errors import InputError
from llamarium.quant.base import QuantizedLinear


@torch.no_grad()
def matrix_of(linear: nn.Module, name: str) -> Tensor:
    """Return W of y = W x, adapters added: (out_features, in_features), float32.

    Args:
        linear: Plain, quantized, or with an adapter.
        name: What it is called, for the error.

    Raises:
        InputError: If it is no Linear that is known.
    """
    if isinstance(linear, LoRALinear):
        if not linear.enabled:
            return matrix_of(linear.base_layer, name)
        return torch.cat([rows for _, _, rows in linear.merged_rows()])
    _check_kind(linear, name)
    return linear.dequantize() if isinstance(linear, QuantizedLinear) else linear.get_parameter("weight").float()


def _check_kind(linear: nn.Module, name: str) -> None:
    if not isinstance(linear, nn.Linear | QuantizedLinear):
        raise InputError(f"{name} is a {type(linear).__name__}, whose matrix is not known; expected a Linear")
