"""Quantization of keys and values to 8 or 4 bits, as in `PagedCache`; `kv_codes.py` defines the formats."""

import torch
import torch.nn.functional as F
from torch import Tensor

from llamarium.kv_codes import GROUP, hadamard, num_groups, values_of

SCALE_DTYPES = {"int8": torch.float32, "int4": torch.bfloat16}


def spread(x: Tensor) -> Tensor:
    """Rotate vectors (..., H) by the Hadamard matrix, its own inverse, in float32; return the same dtype."""
    return hadamard(torch, x.float()).to(x.dtype)


def shapes_of(kind: str, head_dim: int) -> tuple[int, torch.dtype, int]:
    """Return the size and dtype of a vector's codes, and its number of scales."""
    if kind == "int4":
        return num_groups(head_dim) * GROUP // 2, torch.uint8, num_groups(head_dim)
    return head_dim, torch.int8, 1


def encode(kind: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate vectors (..., H) and quantize them to codes and scales."""
    rotated = hadamard(torch, x.float())
    return to_bytes(rotated) if kind == "int8" else to_nibbles(rotated)


def decode(codes: Tensor, scales: Tensor, head_dim: int) -> Tensor:
    """Dequantize vectors, without undoing the rotation: (..., H), float32."""
    return values_of(torch, codes, scales.float(), head_dim)


def to_bytes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize vectors (..., H) to codes (..., H), int8, and scales (..., 1), float32: x is about codes * scale.

    The scale is the largest magnitude divided by 127; codes are rounded to nearest, ties to even. A vector with NaN or
    infinity gets a NaN scale, so that its effects are NaN, too.
    """
    numbers = x.float()
    scale = numbers.abs().amax(dim=-1, keepdim=True) / 127
    usable = scale.isfinite() & (scale > 0)
    codes = torch.where(usable, (numbers / scale).round().clamp(-127, 127), 0).to(torch.int8)
    return codes, torch.where(scale.isfinite(), scale, torch.nan)


def to_nibbles(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize vectors (..., H) to 4 bits: codes as bytes, uint8 (..., 16 * groups), and scales, bfloat16.

    In each group of 32, the scale maps the element of the largest magnitude (the first of equals) to -8. NaN and
    infinities make the scale NaN.
    """
    padded = F.pad(x.float(), (0, num_groups(x.shape[-1]) * GROUP - x.shape[-1]))
    groups = padded.unflatten(-1, (-1, GROUP))
    extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    is_finite = groups.isfinite().all(-1, keepdim=True)
    scale = torch.where(is_finite, extreme / -8, torch.nan).to(torch.bfloat16)
    usable = is_finite & (scale != 0)
    codes = (torch.where(usable, (groups / scale.float()).round().clamp(-8, 7), 0) + 8).to(torch.uint8)
    low, high = codes.chunk(2, -1)
    return (low | high << 4).flatten(-2), scale.squeeze(-1)
