"""From weights to GGUF blocks; for the formats with one level of scales byte for byte as `gguf.quants` does it.

This is the readable form; where there are the CPU kernels, `encode` has them make the same bytes in a fraction of the
time. The K types are in `encode_k.py`.

Every format takes a block of 32 weights, finds the step `d` between levels, and stores the nearest level of each
weight. The reconstruction error is at most half a step for the formats with a minimum (Q4_1, Q5_1) and for Q8_0.
Q4_0 and Q5_0 have one level more below zero than above it and spend it on the largest weight, whatever its sign;
a weight of the same size and the other sign is then cut off by up to one step. To this comes the rounding of the
scales themselves to half precision.

Conventions that bytes depend on: the step is divided in float32 and inverted once (`x * (1 / d)`, not `x / d`), the
codes are found with the unrounded step, and only then is the step rounded to half precision.

Source: gguf-py, `gguf/quants.py`, `quantize_blocks`; ggml-quants.c, `quantize_row_*_ref`.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from llamarium.errors import OptionError
from llamarium.kernels import native
from llamarium.quant.formats import block_format
from llamarium.quant.ggml.encode_k import q4_k, q5_k, q6_k

# Weights per piece: bounds the float32 copies.
_PIECE_WEIGHTS = 2**20


def quantize(weight: Tensor, type_name: str) -> Tensor:
    """Pack weights into blocks.

    Args:
        weight: Floating point, (..., columns).
        type_name: F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K or Q6_K.

    Returns:
        uint8, (..., row_bytes).

    Raises:
        UnsupportedFormatError: If there is no such format.
        OptionError: If the format is read but not written.
        CheckpointError: If the rows are no whole number of blocks.
    """
    block = block_format(type_name)
    if type_name not in _ENCODERS:
        raise OptionError(f"{type_name} is read but not written; expected one of {', '.join(_ENCODERS)}")
    shape = (*weight.shape[:-1], block.row_bytes(weight.shape[-1]))
    packed = torch.empty(shape, dtype=torch.uint8, device=weight.device)
    blocks, values = packed.view(-1, block.block_bytes), weight.detach().reshape(-1, block.block_size)
    step = _PIECE_WEIGHTS // block.block_size
    for start in range(0, len(blocks), step):
        blocks[start : start + step] = _ENCODERS[type_name](values[start : start + step].float())
    return packed


def encode(weight: Tensor, type_name: str) -> Tensor:
    """Pack weights into blocks on the CPU, as `quantize` does, with the kernels where there are any.

    A piece at a time is float32, so that memory holds the weights as they come, and the blocks.
    """
    kind = _KINDS.get(type_name)
    if kind is None or native.library() is None:
        return quantize(weight.detach().cpu(), type_name)
    block = block_format(type_name)
    shape = (*weight.shape[:-1], block.row_bytes(weight.shape[-1]))
    packed = np.empty((weight.numel() // block.block_size, block.block_bytes), dtype=np.uint8)
    values, step = weight.detach().cpu().reshape(-1, block.block_size), _PIECE_WEIGHTS // block.block_size
    for start in range(0, len(packed), step):
        piece = values[start : start + step].float().contiguous()
        native.encode(kind, piece.numpy(), packed[start : start + step])
    return torch.from_numpy(packed).view(shape)


def _bytes(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round (n, k) to `dtype` and show its bytes."""
    return values.to(dtype).view(torch.uint8)


def _inverse(step: Tensor) -> Tensor:
    """Return 1 / step, and 0 for a block of equal weights."""
    return torch.where(step == 0, 0.0, 1 / step)


def _round_half_away(values: Tensor) -> Tensor:
    """Round as C's `roundf`; torch rounds halves to even."""
    size = values.abs()
    floor = size.floor()
    return values.sign() * (floor + (2 * (size - floor)).floor())


def _codes(scaled: Tensor, num_levels: int) -> Tensor:
    """Cut (n, 32) numbers of 0 or more down to whole codes below `num_levels`."""
    return scaled.trunc().clamp_(0, num_levels - 1).to(torch.uint8)


def _nibbles(codes: Tensor) -> Tensor:
    """Pack the low halves of (n, 32) codes: weight i with weight i + 16."""
    return (codes[:, :16] & 15) | (codes[:, 16:] << 4)


def _fifth_bits(codes: Tensor) -> Tensor:
    """Pack bit 4 of (n, 32) codes into (n, 4) bytes, lowest bit first."""
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=codes.device)
    return ((codes >> 4).view(-1, 4, 8) * weights).sum(-1, dtype=torch.uint8)


def _largest(values: Tensor) -> Tensor:
    """Return the first weight of largest size in each block, with its sign: (n, 1)."""
    return values.gather(-1, values.abs().argmax(-1, keepdim=True))


def step_above_minimum(values: Tensor, num_levels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Spread levels evenly from the smallest weight to the largest: (step, minimum, codes)."""
    low, high = values.aminmax(dim=-1, keepdim=True)
    step = (high - low) / (num_levels - 1)
    return step, low, _codes((values - low) * _inverse(step) + 0.5, num_levels)


def step_around_zero(values: Tensor, num_levels: int) -> tuple[Tensor, Tensor]:
    """Spread levels around zero so that the largest weight is exactly the lowest level: (step, codes)."""
    step = _largest(values) / -(num_levels // 2)
    return step, _codes(values * _inverse(step) + (num_levels // 2 + 0.5), num_levels)


def step_both_sides(values: Tensor) -> tuple[Tensor, Tensor]:
    """Spread 255 levels around zero so that the largest weight, of either sign, is an outermost one: (step, codes)."""
    step = values.abs().amax(-1, keepdim=True) / 127
    return step, _round_half_away(values * _inverse(step))


def _q8_0(values: Tensor) -> Tensor:
    step, codes = step_both_sides(values)
    return torch.cat((_bytes(step, torch.float16), _bytes(codes, torch.int8)), dim=-1)


def _q4_0(values: Tensor) -> Tensor:
    step, codes = step_around_zero(values, 16)
    return torch.cat((_bytes(step, torch.float16), _nibbles(codes)), dim=-1)


def _q4_1(values: Tensor) -> Tensor:
    step, low, codes = step_above_minimum(values, 16)
    return torch.cat((_bytes(step, torch.float16), _bytes(low, torch.float16), _nibbles(codes)), dim=-1)


def _q5_0(values: Tensor) -> Tensor:
    step, codes = step_around_zero(values, 32)
    return torch.cat((_bytes(step, torch.float16), _fifth_bits(codes), _nibbles(codes)), dim=-1)


def _q5_1(values: Tensor) -> Tensor:
    step, low, codes = step_above_minimum(values, 32)
    scales = (_bytes(step, torch.float16), _bytes(low, torch.float16))
    return torch.cat((*scales, _fifth_bits(codes), _nibbles(codes)), dim=-1)


_ENCODERS: dict[str, Callable[[Tensor], Tensor]] = {
    "F32": lambda values: _bytes(values, torch.float32),
    "F16": lambda values: _bytes(values, torch.float16),
    "BF16": lambda values: _bytes(values, torch.bfloat16),
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
}

_KINDS = {name: native.Kind[name] for name in ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q4_K", "Q5_K", "Q6_K")}
"""What the kernels make."""
