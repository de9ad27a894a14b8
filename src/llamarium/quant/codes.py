"""Codes and scales of weights and inputs: the reference for quantization and for the layout of tiles.

`unpack_rows` reads rows from tiles, `coded` quantizes a matrix, `round_inputs` quantizes the inputs of packed weights,
and `product_reference` multiplies the two. A parameter `xp` is the module of a function's arrays, `numpy` or `torch`,
as in `ggml/decode.py`; functions without it use numpy.
"""

import functools
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamarium.errors import OptionError
from llamarium.kernels.input_bits import INPUT_BITS, InputBits
from llamarium.quant.formats import FORMATS, GROUP, PACKED_FORMATS, TILE_ROWS, PackedFormat
from llamarium.quant.ggml.decode import five_bit_codes, super_blocks
from llamarium.quant.ggml.fields import to_float
from llamarium.quant.nf4_state import LEVELS, NESTED_BLOCK_SIZE

Floats = NDArray[np.float32]

NF4_BLOCK = 64
"""Number of consecutive weights of the flattened matrix that share a scale."""


class Codes(NamedTuple):
    """Quantized rows of a matrix: levels[codes] * scales + minimums.

    Axes: R rows, C columns, P parts of a row, each with its scale.

    Attributes:
        type_name: Name of the type, as in GGUF; "NF4" as in bitsandbytes.
        levels: Value of each code, before scaling.
        codes_RC: int64; the index of each weight's level.
        scales_RP: float32.
        minimums_RP: float32; None if the type has no minimums.
    """

    type_name: str
    levels: tuple[float, ...]
    codes_RC: NDArray[np.int64]
    scales_RP: Floats
    minimums_RP: Floats | None = None

    def spread(self, parts_RP: Floats) -> Floats:
        """Repeat the value of each part for all its weights: (R, P) to (R, C)."""
        return parts_RP.repeat(self.codes_RC.shape[1] // parts_RP.shape[1], axis=1)

    def rows(self, rows: Sequence[int]) -> "Codes":
        """Return the rows with these indices."""
        at, minimums = list(rows), self.minimums_RP
        halves = self.scales_RP[at], None if minimums is None else minimums[at]
        return Codes(self.type_name, self.levels, self.codes_RC[at], *halves)

    @property
    def values_RC(self) -> Floats:
        """Dequantized weights, float32 (R, C)."""
        values_RC = np.array(self.levels, np.float32)[self.codes_RC] * self.spread(self.scales_RP)
        return values_RC if self.minimums_RP is None else values_RC + self.spread(self.minimums_RP)


def levels_of(format: PackedFormat) -> tuple[float, ...]:
    """Return the value of each code of a packed type, before scaling."""
    return tuple(format.levels or range(-format.zero, format.num_levels - format.zero))


# --- out of tiles -----------------------------------------------------------------------------------------------------


def unpack_rows(tiles: NDArray[np.uint8], rows: NDArray[np.int64], format: PackedFormat) -> Codes:
    """Read rows, by their indices (n,), from tiles (panels, tiles, tile_bytes)."""
    codes, scale, minimum = parts_of_rows(np, tiles, rows, format)
    return Codes(format.name, levels_of(format), codes.astype(np.int64), scale, minimum)


def parts_of_rows(xp: Any, tiles: Any, rows: Any, format: PackedFormat) -> tuple[Any, Any, Any]:
    """Read the codes, scales and minima of rows, by their indices (n,), from tiles.

    In a file the codes of a row are contiguous. The kernels multiply 16 rows at once, and memory is read fastest
    sequentially, so packed weights are stored in tiles of 16 rows, in the order in which they are multiplied:
    (panels of 16 rows, tiles of 32 or 256 columns, bytes per tile). `native/tiles.h` defines the layout of a tile; its
    sizes and offsets are also in `quant/formats.py`, and a test compares them with C's.

    Returns:
        Codes, uint8 (n, in); scales, float32 (n, scales per row); and minima of the same shape, or None. Each scale
        applies to an equal part of the row, and is exact: a scale of a K type is the product of its two factors.
    """

    def of_rows(part: Any, *shape: int) -> Any:
        return part.reshape(*part.shape[:2], -1, TILE_ROWS, *shape)[rows // TILE_ROWS, :, :, rows % TILE_ROWS]

    coded = tiles[..., format.head_bytes : format.head_bytes + format.columns // GROUP * format.code_bytes]
    lines = of_rows(coded, 4).reshape(len(rows), -1, format.code_bytes // 64, 4)
    codes = _split_bits(xp, lines).reshape(len(rows), -1)
    start = 0 if format.is_super else format.code_bytes // 2
    halves = to_float(xp, of_rows(tiles.view(xp.float16)[..., start : start + format.half_bytes // 2]))
    scale, minimum = halves[..., 0], halves[..., 1] if format.has_minimum else None
    if not format.is_super:
        return codes, scale, minimum
    integers = of_rows(tiles[..., format.half_bytes : format.head_bytes])
    if format.levels is not None:
        return codes, _times(xp, scale, _split_signed_six_bits(xp, integers)), None
    if minimum is None:
        return codes, _times(xp, scale, integers.view(xp.int8)), None
    small, low = _split_six_bits(xp, integers)
    return codes, _times(xp, scale, small), -_times(xp, minimum, low)


def _times(xp: Any, halves: Any, integers: Any) -> Any:
    """Multiply (n, tiles) by (n, tiles, parts), giving (n, tiles * parts)."""
    return (halves[..., None] * to_float(xp, integers)).reshape(len(halves), -1)


def _split_bits(xp: Any, lines: Any) -> Any:
    """Unpack the codes of lines (n, groups, lines, 4) to (n, groups, 8, 4)."""
    width = lines.shape[2] - 4  # high bits of a code
    if width == 4:
        return lines
    low = lines[:, :, :4]
    codes = xp.concatenate((low & 15, low >> 4), 2)
    if width == 0:
        return codes
    high = [(lines[:, :, 4:] >> (width * i)) & (2**width - 1) for i in range(8 // width)]
    return codes | (xp.stack(high, 3).reshape(codes.shape) << 4)


def _split_six_bits(xp: Any, packed: Any) -> tuple[Any, Any]:
    """Unpack scales and minima, each (n, tiles, 8), from the 12 bytes of a K type's block, (n, tiles, 12)."""
    high = packed[..., 8:]
    parts = [
        (packed[..., 4 * half : 4 * half + 4] >> shift & 15) | ((high >> (4 * half + shift // 2) & 3) << 4)
        for half in (0, 1)
        for shift in (0, 4)
    ]
    return xp.concatenate(parts[:2], -1), xp.concatenate(parts[2:], -1)


def _split_signed_six_bits(xp: Any, packed: Any) -> Any:
    """Unpack the scales of IQ4_XS, -32 to 31, (n, tiles, 8), from 6 bytes (n, tiles, 6)."""
    low, high = packed[..., :4], packed[..., 4:]
    top = xp.stack([high >> shift & 3 for shift in (0, 2, 4, 6)], -1).reshape(*high.shape[:-1], 8)
    return to_float(xp, xp.concatenate((low & 15, low >> 4), -1) | (top << 4)) - 32


# --- anew -------------------------------------------------------------------------------------------------------------


def coded(matrix_OI: Floats, type_name: str) -> Codes:
    """Quantize a matrix, float32 (O, I), to a type in `METHODS`, as `load` does.

    OptionError if I is not a multiple of the block size.
    """
    if type_name == "NF4":
        with np.errstate(all="ignore"):
            return _nf4(matrix_OI)
    if matrix_OI.shape[1] % FORMATS[type_name].block_size:
        raise OptionError(
            f"rows of {matrix_OI.shape[1]} weights cannot be {type_name}; expected a multiple of "
            f"{FORMATS[type_name].block_size}"
        )
    from llamarium.quant.ggml.encode import encode  # imported only when something is quantized

    return codes_of_blocks(encode(matrix_OI, type_name), type_name)


def codes_of_blocks(blocks_OB: NDArray[np.uint8], type_name: str) -> Codes:
    """Unpack GGUF blocks, rows of bytes (O, B), of a type in `PACKED_FORMATS`."""
    format, num_rows = PACKED_FORMATS[type_name], len(blocks_OB)
    blocks = np.ascontiguousarray(blocks_OB).reshape(-1, format.block_bytes)
    codes, scales, minimums = (_super_parts if format.is_super else _small_parts)(blocks, format)
    by_row = None if minimums is None else minimums.reshape(num_rows, -1)
    codes_RC = codes.astype(np.int64).reshape(num_rows, -1)
    return Codes(type_name, levels_of(format), codes_RC, scales.reshape(num_rows, -1), by_row)


def _small_parts(blocks: NDArray[np.uint8], format: PackedFormat) -> tuple[NDArray[Any], Floats, Floats | None]:
    """Unpack codes (n, 32), scales (n, 1) and minima (n, 1) of blocks of 32 weights."""
    start = 2 * (1 + format.has_minimum)
    halves = np.ascontiguousarray(blocks[:, :start]).view(np.float16).astype(np.float32)
    if format.num_levels == 256:
        codes = blocks[:, start:] ^ 128
    elif format.num_levels == 32:
        codes = five_bit_codes(np, blocks[:, start : start + 4], blocks[:, start + 4 :])
    else:
        codes = np.concatenate((blocks[:, start:] & 15, blocks[:, start:] >> 4), axis=1)
    return codes, halves[:, :1], halves[:, 1:] if format.has_minimum else None


def _super_parts(blocks: NDArray[np.uint8], format: PackedFormat) -> tuple[NDArray[Any], Floats, Floats | None]:
    """Unpack codes (n, 256), scales and minima (n, sub-blocks) of a K type's blocks."""
    parts = super_blocks(np, blocks, format.name)
    with np.errstate(all="ignore"):
        scales = parts.d.astype(np.float32) * parts.scales
        minimums = None if parts.minima is None else -(parts.dmin.astype(np.float32) * parts.minima)
    return parts.codes, scales, minimums


def _nf4(matrix_OI: Floats) -> Codes:
    codes, absmax = nf4_blocks(np, matrix_OI.reshape(-1), NF4_BLOCK)
    places, largest, levels, offset = nf4_scales(np, absmax)
    scales = (levels[places] * largest.repeat(NESTED_BLOCK_SIZE)[: len(places)] + offset).astype(np.float32)
    scales_RC = scales.repeat(NF4_BLOCK)[: matrix_OI.size].reshape(matrix_OI.shape)  # blocks may cross rows
    return Codes("NF4", LEVELS, codes.astype(np.int64).reshape(matrix_OI.shape), scales_RC)


def nf4_blocks(xp: Any, flat: Any, block_size: int) -> tuple[Any, Any]:
    """Quantize float32 (n,) to NF4.

    Returns:
        Codes, uint8 (n,), and the absmax of each block, (blocks,); the last block may be short.
    """
    num_whole = len(flat) // block_size * block_size
    blocks, rest = flat[:num_whole].reshape(-1, block_size), flat[num_whole:]
    absmax = xp.amax(abs(blocks), -1)
    scaled = (blocks * (1.0 / xp.clip(absmax, 1e-38, None))[:, None]).reshape(-1)
    if len(rest):  # bitsandbytes divides in the short last block and multiplies in the others; the bytes depend on it
        last = xp.clip(xp.amax(abs(rest), -1, keepdims=True), 1e-38, None)
        absmax, scaled = xp.concatenate((absmax, last)), xp.concatenate((scaled, rest / last))
    scaled = xp.clip(scaled, -1, 1)
    codes = xp.zeros_like(scaled, dtype=xp.uint8)
    for midpoint in _MIDPOINTS:
        codes += scaled > midpoint  # fifteen comparisons take half the time of a binary search
    return codes, absmax


def nf4_scales(xp: Any, absmax: Any) -> tuple[Any, Any, Any, Any]:
    """Quantize NF4's scales, float32 (n,), in blocks of 256, to the levels of a dynamic map.

    On the CPU, bitsandbytes looks up the code in a table of 65,536 entries. Therefore a scaled value is rounded to that
    grid before the nearest level is found, and a block of zeros (0 / 0) gets the lowest code.

    Returns:
        Codes, uint8 (n,); the absmax of each block, (blocks,); the levels, (256,); and the mean that was subtracted,
        ().
    """
    offset = absmax.mean()
    missing = xp.zeros_like(absmax[:1]).repeat(-len(absmax) % NESTED_BLOCK_SIZE)
    padded = xp.concatenate((absmax - offset, missing)).reshape(-1, NESTED_BLOCK_SIZE)
    largest = xp.amax(abs(padded), -1)
    scaled = xp.clip(xp.nan_to_num(padded * (1 / largest)[:, None], nan=-1.0), -1, 1).reshape(-1)[: len(absmax)]
    snapped = xp.floor((scaled + 1) * 0.5 * 65535 + 0.5) / 65535 * 2 - 1
    levels = xp.asarray(dynamic_map())
    levels = levels if xp is np else levels.to(absmax.device)
    codes = xp.searchsorted((levels[:-1] + levels[1:]) / 2, snapped)
    return xp.asarray(codes, dtype=xp.uint8), largest, levels, offset


_MIDPOINTS = [(low + high) / 2 for low, high in pairwise(np.array(LEVELS, np.float32))]


@functools.cache
def dynamic_map() -> Floats:
    """Return the 256 levels of nested scales, float32 (256,), ascending.

    Each decade from 1e-6 to 1 has twice as many evenly spaced levels as the one below it, with both signs; 0 and 1 are
    levels too.
    """
    decades: list[Floats] = []
    for exponent in range(7):
        num_levels = 2**exponent
        gap = float(np.float32(1 - np.float32(0.1)) / np.float32(num_levels))  # the same bits as torch.linspace
        steps = np.arange(num_levels + 1)
        ends = float(np.float32(0.1)) + gap * steps, 1 - gap * (num_levels - steps)
        edges = np.where(steps < (num_levels + 1) // 2, *ends).astype(np.float32)
        decades.append(np.float32(10.0 ** (exponent - 6)) * ((edges[:-1] + edges[1:]) / 2))
    positive = np.concatenate(decades)
    return np.sort(np.concatenate((positive, -positive, [0, 1]))).astype(np.float32)


# --- inputs -----------------------------------------------------------------------------------------------------------


_MOST_OUTLIER_CODE = 127.0 + 256 * 127
_LEAST_SCALE, _MOST_SCALE = np.float32(2.0**-100), 2.0**110  # so that no product is subnormal or infinite
_BELOW_EIGHTHS = 2**20 - 1  # bits of a float's mantissa, without the upper three


def round_inputs(x_MI: Floats) -> tuple[NDArray[np.int64], Floats]:
    """Quantize groups of 32 inputs to 8 bits, and their outliers to 16 bits (docs/decisions/0022).

    The outliers of a group are the four inputs 4 j to 4 j + 3 that include the largest magnitude. The scale is chosen
    so that all other codes are up to 127, and has three bits of mantissa: 1, 1.125, 1.25, ... times a power of two. It
    is NaN if an input is NaN or infinite, or so large that the product would not be finite.

    Args:
        x_MI: float32, (M, in).

    Returns:
        codes: int64, (M, in).
        scales: float32, (M, groups); x is approximately codes * scales.
    """
    fours = x_MI.reshape(len(x_MI), -1, GROUP // 4, 4)
    # As in the kernels: magnitudes are compared without their last three bits, and the first of equal fours is taken.
    keys = (abs(fours).max(-1).view(np.int32) & ~7) | np.arange(7, -1, -1, dtype=np.int32)
    key = keys.max(-1, keepdims=True)
    is_outlier = keys == key
    largest = (key & ~7).view(np.float32)
    second_largest = (np.where(is_outlier, 0, keys).max(-1, keepdims=True) & ~7).view(np.float32)
    min_scale = np.maximum(largest / np.float32(_MOST_OUTLIER_CODE), second_largest / np.float32(127))
    bits = np.maximum(min_scale, _LEAST_SCALE).view(np.int32)
    scale = ((bits + _BELOW_EIGHTHS) & ~_BELOW_EIGHTHS).view(np.float32)
    scale = np.where(min_scale <= _MOST_SCALE, scale, np.float32(np.nan))
    codes = np.nan_to_num((fours * (1 / scale)[..., None]).round(), nan=0, posinf=0, neginf=0).astype(np.int64)
    codes += is_outlier[..., None] & (codes % 256 == 128)  # so that no low byte is -128
    return codes.reshape(x_MI.shape), scale[..., 0]


@np.errstate(all="ignore")
def product_reference(x_MI: Floats, weights: Codes, input_bits: InputBits = INPUT_BITS) -> Floats:
    """Multiply like the C kernels: x (M, in) to (M, out), float32. A slow, readable reference."""
    codes, scale_MG = round_inputs(x_MI)
    y_MO = _product_of_codes(codes, scale_MG, weights)
    if input_bits == 16:
        rounded_MI = codes.astype(np.float32) * scale_MG.repeat(GROUP, axis=1)
        y_MO += _product_of_codes(*round_inputs((x_MI - rounded_MI).astype(np.float32)), weights)
    return y_MO


def _product_of_codes(codes: NDArray[np.int64], scale_MG: Floats, weights: Codes) -> Floats:
    scale_OP, minimum_OP = weights.scales_RP, weights.minimums_RP  # 32 or 16 columns share a scale
    values = np.array(weights.levels)[weights.codes_RC].reshape(*scale_OP.shape, -1)
    codes = codes.reshape(len(codes), scale_OP.shape[1], -1)
    scale_MP = scale_MG.repeat(scale_OP.shape[1] // scale_MG.shape[1], axis=1)
    sums_MOP = np.einsum("mpc,opc->mop", codes.astype(np.float64), values).astype(np.float32)  # rounded once
    y_MO = (sums_MOP * (scale_OP * scale_MP[:, None])).sum(-1)
    if minimum_OP is not None:
        y_MO += (codes.sum(-1).astype(np.float32) * scale_MP) @ minimum_OP.T
    return y_MO
