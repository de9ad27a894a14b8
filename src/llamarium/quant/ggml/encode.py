"""From weights to GGUF blocks; for the formats with one level of scales byte for byte as `gguf.quants` does it.

`encode_reference` is the readable form, in numpy; `encode` makes the same bytes with the CPU kernels in a fraction of
the time, where there are any. The K types are in `encode_k.py`.

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
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamarium.errors import OptionError
from llamarium.kernels import native, structs
from llamarium.quant.formats import IQ4_NL_VALUES, block_format
from llamarium.quant.ggml.encode_k import Codes, Floats, q4_k, q5_k, q6_k
from llamarium.quant.packing import to_bfloat16, to_float32

# Weights per piece: bounds the float32 copies.
_PIECE_WEIGHTS = 2**20


def encode(values: NDArray[Any], type_name: str) -> Codes:
    """Pack weights into blocks, with the CPU kernels where there are any.

    A piece at a time is float32, so that memory holds the weights as they come, and the blocks.

    Args:
        values: float32, float16, or bfloat16's bits as uint16, (..., columns).
        type_name: One of `ENCODED`.

    Returns:
        uint8, (..., row_bytes).
    """
    kind = _KINDS.get(type_name)
    if kind is None or native.library() is None:
        return encode_reference(values, type_name)

    def by_kernels(piece: Floats) -> Codes:
        blocks = np.empty((len(piece), block_format(type_name).block_bytes), np.uint8)
        native.encode(kind, np.ascontiguousarray(piece), blocks)
        return blocks

    return _in_pieces(values, type_name, by_kernels)


def encode_reference(values: NDArray[Any], type_name: str) -> Codes:
    """Pack weights into blocks in numpy; see `encode`."""
    block_format(type_name)
    if type_name not in _ENCODERS:
        raise OptionError(f"{type_name} is read but not written; expected one of {', '.join(_ENCODERS)}")
    with np.errstate(all="ignore"):
        return _in_pieces(values, type_name, _ENCODERS[type_name])


def _in_pieces(values: NDArray[Any], type_name: str, encode_piece: Callable[[Floats], Codes]) -> Codes:
    block = block_format(type_name)
    packed = np.empty((*values.shape[:-1], block.row_bytes(values.shape[-1])), np.uint8)
    blocks, weights = packed.reshape(-1, block.block_bytes), values.reshape(-1, block.block_size)
    step = _PIECE_WEIGHTS // block.block_size
    for start in range(0, len(blocks), step):
        blocks[start : start + step] = encode_piece(to_float32(weights[start : start + step]))
    return packed


def _bytes(values: NDArray[Any], dtype: type[np.generic]) -> Codes:
    return np.ascontiguousarray(values.astype(dtype)).view(np.uint8)


def inverse_of(step: Floats) -> Floats:
    """Return 1 / step, and 0 for a block of equal weights."""
    return np.where(step == 0, np.float32(0), 1 / step)


def _round_half_away(values: Floats) -> Floats:
    """Round as C's `roundf`; numpy rounds halves to even."""
    size = np.abs(values)
    floor = np.floor(size)
    return np.sign(values) * (floor + np.floor(2 * (size - floor)))


def _codes(scaled: Floats, num_levels: int) -> Codes:
    """Cut (n, 32) numbers of 0 or more down to whole codes below `num_levels`."""
    return np.clip(np.trunc(scaled), 0, num_levels - 1).astype(np.uint8)


def _nibbles(codes: Codes) -> Codes:
    """Pack the low halves of (n, 32) codes: weight i with weight i + 16."""
    return (codes[:, :16] & 15) | (codes[:, 16:] << 4)


def _fifth_bits(codes: Codes) -> Codes:
    """Pack bit 4 of (n, 32) codes into (n, 4) bytes, lowest bit first."""
    return np.packbits(codes >> 4, axis=-1, bitorder="little")


def largest_of(values: Floats) -> Floats:
    """Return the first weight of largest size in each block, with its sign: (n, 1)."""
    return np.take_along_axis(values, np.abs(values).argmax(-1, keepdims=True), -1)


def step_above_minimum(values: Floats, num_levels: int) -> tuple[Floats, Floats, Codes]:
    """Spread levels evenly from the smallest weight to the largest: (step, minimum, codes)."""
    low, high = values.min(-1, keepdims=True), values.max(-1, keepdims=True)
    step = (high - low) / (num_levels - 1)
    return step, low, _codes((values - low) * inverse_of(step) + 0.5, num_levels)


def step_around_zero(values: Floats, num_levels: int) -> tuple[Floats, Codes]:
    """Spread levels around zero so that the largest weight is exactly the lowest level: (step, codes)."""
    step = largest_of(values) / -(num_levels // 2)
    return step, _codes(values * inverse_of(step) + (num_levels // 2 + 0.5), num_levels)


def step_both_sides(values: Floats) -> tuple[Floats, Floats]:
    """Spread 255 levels around zero so that the largest weight, of either sign, is an outermost one: (step, codes)."""
    step = np.abs(values).max(-1, keepdims=True) / 127
    return step, _round_half_away(values * inverse_of(step))


def _q8_0(values: Floats) -> Codes:
    step, codes = step_both_sides(values)
    return np.concatenate((_bytes(step, np.float16), _bytes(codes, np.int8)), axis=-1)


def _q4_0(values: Floats) -> Codes:
    step, codes = step_around_zero(values, 16)
    return np.concatenate((_bytes(step, np.float16), _nibbles(codes)), axis=-1)


def _q4_1(values: Floats) -> Codes:
    step, low, codes = step_above_minimum(values, 16)
    return np.concatenate((_bytes(step, np.float16), _bytes(low, np.float16), _nibbles(codes)), axis=-1)


def _q5_0(values: Floats) -> Codes:
    step, codes = step_around_zero(values, 32)
    return np.concatenate((_bytes(step, np.float16), _fifth_bits(codes), _nibbles(codes)), axis=-1)


def _q5_1(values: Floats) -> Codes:
    step, low, codes = step_above_minimum(values, 32)
    scales = (_bytes(step, np.float16), _bytes(low, np.float16))
    return np.concatenate((*scales, _fifth_bits(codes), _nibbles(codes)), axis=-1)


def _iq4_nl(values: Floats) -> Codes:
    """Search the step, of either sign, with the least squared error; errors count by the weights' squares.

    Tried are steps with which the largest weight lies near the lowest level, each improved by least squares.
    """
    levels = np.array(IQ4_NL_VALUES, np.float32)
    largest, costs = largest_of(values), values * values
    best_step, best_gain = largest / levels[0], np.full_like(largest, -np.inf)
    for shift in _IQ4_SHIFTS:
        level_of = levels[_nearest_level(values * (inverse_of(largest) * (levels[0] + np.float32(shift))))]
        weighted = costs * level_of
        squares, products = _sum(weighted * level_of), _sum(weighted * values)
        gain = np.where(squares > 0, products * products / squares, np.float32(0))
        better = gain > best_gain
        best_step = np.where(better & (squares > 0), products / squares, best_step)
        best_gain = np.where(better, gain, best_gain)
    step = _bytes(best_step, np.float16)
    rounded = step.view(np.float16).astype(np.float32)
    return np.concatenate((step, _nibbles(_nearest_level(values * inverse_of(rounded)))), axis=-1)


_IQ4_SHIFTS = range(-7, 8)
_IQ4_MIDPOINTS = [(low + high) / 2 for low, high in pairwise(IQ4_NL_VALUES)]


def _sum(values: Floats) -> Floats:
    """Add up (n, 32) one after the other, as C does: (n, 1)."""
    total = np.zeros_like(values[:, :1])
    for i in range(values.shape[1]):
        total = total + values[:, i : i + 1]
    return total


def _nearest_level(scaled: Floats) -> Codes:
    """Return the code of the level of IQ4_NL that is nearest to each number, uint8."""
    codes = np.zeros(scaled.shape, np.uint8)
    for midpoint in _IQ4_MIDPOINTS:
        codes += scaled > midpoint  # fifteen plain passes take half the time of a search
    return codes


_ENCODERS: dict[str, Callable[[Floats], Codes]] = {
    "F32": lambda values: _bytes(values, np.float32),
    "F16": lambda values: _bytes(values, np.float16),
    "BF16": lambda values: to_bfloat16(values).view(np.uint8),
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "IQ4_NL": _iq4_nl,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
}

_KINDS = {name: structs.Kind[name] for name in ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "IQ4_NL", "Q4_K", "Q5_K", "Q6_K")}
"""What the kernels make."""
