"""Dequantize GGUF blocks to tensors; `decode.py` defines every format."""

import torch
from torch import Tensor

from llamarium.errors import CheckpointError
from llamarium.quant.formats import block_format
from llamarium.quant.ggml.decode import decode_into


def dequantize(
    packed: Tensor, type_name: str, dtype: torch.dtype = torch.float32, *, out: Tensor | None = None
) -> Tensor:
    """Dequantize packed rows.

    Args:
        packed: uint8, (..., row_bytes).
        type_name: A key of `GGML_TYPES`.
        dtype: Data type of the result. The arithmetic is always float32; the result is rounded once.
        out: Output tensor, contiguous, (..., columns); its dtype takes precedence over `dtype`.

    Returns:
        (..., columns).
    """
    block = block_format(type_name)
    if packed.dtype != torch.uint8 or packed.ndim == 0:
        raise CheckpointError(f"{type_name} weights are {packed.dtype} {tuple(packed.shape)}; expected rows of uint8")
    shape = (*packed.shape[:-1], block.num_columns(packed.shape[-1]))
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=packed.device)
    assert out.shape == shape and out.is_contiguous()
    decode_into(torch, packed, type_name, out)
    return out
