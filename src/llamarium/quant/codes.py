"""Weights and inputs as codes and scales, in numpy: to look at, and to compute with what they mean.

`unpack_rows` takes rows out of the kernels' tiles, `coded` codes a matrix anew, and `round_inputs` rounds what packed
weights are multiplied with. Other files of this folder define the
same in PyTorch; tests hold the two equal.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamarium.quant.formats import GROUP, TILE_ROWS, PackedFormat, group_size
from llamarium.quant.nf4_state import LEVELS, NESTED_BLOCK_SIZE

Floats = NDArray[np.float32]

NF4_BLOCK = 64
"""Weights that share a scale, of the flat matrix."""


class Codes(NamedTuple):
    """Rows of a matrix: levels[codes] * scales + minimums. R rows, C columns, P parts of a row with a scale each.

    Attributes:
        type_name: The type, by GGUF's name; NF4 by bitsandbytes'.
        levels: What each code stands for before the scale.
        codes_RC: int64; the index of each weight's level.
        scales_RP: float32.
        minimums_RP: float32; None where the type has none.
    """

    type_name: str
    levels: tuple[float, ...]
    codes_RC: NDArray[np.int64]
    scales_RP: Floats
    minimums_RP: Floats | None = None

    def spread(self, parts_RP: Floats) -> Floats:
        """Return the number of its part for each weight: (R, P) to (R, C)."""
        return parts_RP.repeat(self.codes_RC.shape[1] // parts_RP.shape[1], axis=1)

    def rows(self, rows: Sequence[int]) -> "Codes":
        """Return some of the rows."""
        at, minimums = list(rows), self.minimums_RP
        halves = self.scales_RP[at], None if minimums is None else minimums[at]
        return Codes(self.type_name, self.levels, self.codes_RC[at], *halves)

    @property
    def values_RC(self) -> Floats:
        """What the weights mean."""
        values_RC = np.array(self.levels, np.float32)[self.codes_RC] * self.spread(self.scales_RP)
        return values_RC if self.minimums_RP is None else values_RC + self.spread(self.minimums_RP)


def levels_of(format: PackedFormat) -> tuple[float, ...]:
    """Return what a packed type's codes stand for."""
    return tuple(format.levels or range(-format.zero, format.num_levels - format.zero))


# --- out of tiles -----------------------------------------------------------------------------------------------------


def unpack_rows(tiles: NDArray[np.uint8], rows: NDArray[np.int64], format: PackedFormat) -> Codes:
    """Take some rows out of tiles (panels, tiles, bytes); each scale of a K type is the product of its two factors."""
    panel, row = rows // TILE_ROWS, rows % TILE_ROWS
    edge = tiles.shape[:2]
    coded = tiles[..., format.head_bytes : format.head_bytes + format.columns // GROUP * format.code_bytes]
    lines = coded.reshape(*edge, -1, format.code_bytes // 64, TILE_ROWS, 4)[panel, :, :, :, row]
    codes_RC = _split_bits(lines.reshape(len(rows), -1, *lines.shape[3:])).reshape(len(rows), -1).astype(np.int64)
    start = 0 if format.is_super else format.code_bytes
    halves = np.ascontiguousarray(tiles[..., start : start + format.half_bytes]).view(np.float16)
    halves = halves.reshape(*edge, -1, TILE_ROWS)[panel, :, :, row].astype(np.float32)
    scale, minimum = halves[..., 0], halves[..., 1] if format.has_minimum else None
    if format.is_super:
        integers = tiles[..., format.half_bytes : format.head_bytes].reshape(*edge, -1, TILE_ROWS)[panel, :, :, row]
        if minimum is None:
            scale = _times(scale, integers.view(np.int8))
        else:
            small, low = _split_six_bits(integers)
            scale, minimum = _times(scale, small), -_times(minimum, low)
    return Codes(format.name, levels_of(format), codes_RC, scale, minimum)


def _times(halves: Floats, integers: NDArray[Any]) -> Floats:
    """Multiply (n, tiles) with (n, tiles, parts): (n, tiles * parts)."""
    return (halves[..., None] * integers.astype(np.float32)).reshape(len(halves), -1)


def _split_bits(lines: NDArray[np.uint8]) -> NDArray[Any]:
    """Return the codes of lines (n, groups, lines, 4): (n, groups, 8, 4)."""
    width = lines.shape[2] - 4  # high bits of a code
    if width == 4:
        return lines
    low = lines[:, :, :4]
    codes = np.concatenate((low & 15, low >> 4), axis=2)
    if width == 0:
        return codes
    high = [(lines[:, :, 4:] >> (width * i)) & (2**width - 1) for i in range(8 // width)]
    return codes | (np.stack(high, axis=3).reshape(codes.shape) << 4)


def _split_six_bits(packed: NDArray[np.uint8]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return scales and minima (n, tiles, 8) of the K types' 12 bytes (n, tiles, 12)."""
    *lows, high = np.split(packed, 3, axis=-1)
    parts = [
        (low >> shift & 15) | ((high >> (4 * which + shift // 2) & 3) << 4)
        for which, low in enumerate(lows)
        for shift in (0, 4)
    ]
    return np.concatenate(parts[:2], axis=-1), np.concatenate(parts[2:], axis=-1)


# --- anew -------------------------------------------------------------------------------------------------------------


def coded(matrix_OI: Floats, type_name: Literal["NF4", "Q8_0", "Q4_1"]) -> Codes:
    """Code a matrix as a type has it.

    Raises:
        OptionError: For a shape that the type cannot take.
    """
    return {"NF4": _nf4, "Q8_0": _q8_0, "Q4_1": _q4_1}[type_name](matrix_OI)


def _q8_0(matrix_OI: Floats) -> Codes:
    groups = matrix_OI.reshape(len(matrix_OI), -1, math.gcd(matrix_OI.shape[1], GROUP))
    scale = _half(abs(groups).max(-1, keepdims=True) / 127)
    codes = np.clip(_rounded(groups, scale), -127, 127).astype(np.int64) + 128
    return Codes("Q8_0", tuple(range(-128, 128)), codes.reshape(matrix_OI.shape), scale[..., 0])


def _q4_1(matrix_OI: Floats) -> Codes:
    groups = matrix_OI.reshape(len(matrix_OI), -1, group_size(matrix_OI.shape[1]))
    smallest, largest = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    step, minimum = _half((largest - smallest) / 15), _half(smallest)
    codes = np.clip(_rounded(groups - minimum, step), 0, 15).astype(np.int64)
    return Codes("Q4_1", tuple(range(16)), codes.reshape(matrix_OI.shape), step[..., 0], minimum[..., 0])


def _nf4(matrix_OI: Floats) -> Codes:
    flat = matrix_OI.reshape(-1)
    padded = np.zeros(-(-len(flat) // NF4_BLOCK) * NF4_BLOCK, np.float32)
    padded[: len(flat)] = flat
    blocks = padded.reshape(-1, NF4_BLOCK)
    absmax = abs(blocks).max(-1)
    scaled = np.clip(blocks * (1 / np.maximum(absmax, np.float32(1e-38)))[:, None], -1, 1)
    codes, levels = np.zeros(blocks.shape, np.int64), np.array(LEVELS, np.float32)
    for midpoint in (levels[:-1] + levels[1:]) / 2:
        codes += scaled > midpoint
    scales = _double_quantized(absmax).repeat(NF4_BLOCK)[: len(flat)]  # blocks may cross rows: one for each weight
    shape = matrix_OI.shape
    return Codes("NF4", LEVELS, codes.reshape(-1)[: len(flat)].reshape(shape), scales.reshape(shape))


def _double_quantized(absmax: Floats) -> Floats:
    """Return NF4's scales after their own quantization, in blocks of 256, to the levels of a dynamic map."""
    offset = absmax.mean()
    padded = np.zeros(-(-len(absmax) // NESTED_BLOCK_SIZE) * NESTED_BLOCK_SIZE, np.float32)
    padded[: len(absmax)] = absmax - offset
    blocks = padded.reshape(-1, NESTED_BLOCK_SIZE)
    largest = abs(blocks).max(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = np.clip(np.nan_to_num(blocks * (1 / largest), nan=-1.0), -1, 1)
    snapped = np.floor((scaled + 1) * np.float32(0.5) * 65535 + np.float32(0.5)) / 65535 * 2 - 1
    levels = _dynamic_map()
    places = np.searchsorted((levels[:-1] + levels[1:]) / 2, snapped)
    return np.add((levels[places] * largest).reshape(-1), offset, dtype=np.float32)[: len(absmax)]


def _dynamic_map() -> Floats:
    """Return the 256 levels for nested scales, ascending: each decade from 1e-6 to 1 has twice as many as the last."""
    edges = [np.linspace(0.1, 1, 2**exponent + 1, dtype=np.float32) for exponent in range(7)]
    decades = [np.float32(10.0 ** (i - 6)) * ((e[:-1] + e[1:]) / 2) for i, e in enumerate(edges)]
    positive = np.concatenate(decades)
    return np.sort(np.concatenate((positive, -positive, [0, 1]))).astype(np.float32)


def _half(values: Floats) -> Floats:
    """Round to float16."""
    return values.astype(np.float16).astype(np.float32)


def _rounded(groups: Floats, scale: Floats) -> Floats:
    """Return groups / scale as whole numbers; of a group of equal weights the scale is 0, and so are its codes."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.nan_to_num(groups / scale).round()


# --- inputs -----------------------------------------------------------------------------------------------------------


_MOST_OUTLIER_CODE = 127.0 + 256 * 127
_LEAST_SCALE, _MOST_SCALE = np.float32(2.0**-100), 2.0**110
_BELOW_EIGHTHS = 2**20 - 1  # the bits of a float's mantissa but for the upper three


def round_inputs(x_MI: Floats) -> tuple[NDArray[np.int64], Floats]:
    """Round groups of 32 inputs to 8 bits, and their outliers to 16, as `packed.quantize_inputs` says.

    Returns:
        codes: (M, in).
        scales: (M, groups); x is nearly codes * scales.
    """
    fours = x_MI.reshape(len(x_MI), -1, GROUP // 4, 4)
    keys = (abs(fours).max(-1).view(np.int32) & ~7) | np.arange(7, -1, -1, dtype=np.int32)
    key = keys.max(-1, keepdims=True)
    is_outlier = keys == key
    largest = (key & ~7).view(np.float32)
    others = (np.where(is_outlier, 0, keys).max(-1, keepdims=True) & ~7).view(np.float32)
    needed = np.maximum(largest / np.float32(_MOST_OUTLIER_CODE), others / np.float32(127))
    bits = np.maximum(needed, _LEAST_SCALE).view(np.int32)
    scale = ((bits + _BELOW_EIGHTHS) & ~_BELOW_EIGHTHS).view(np.float32)
    scale = np.where(needed <= _MOST_SCALE, scale, np.float32(np.nan))
    codes = np.nan_to_num((fours * (1 / scale)[..., None]).round(), nan=0, posinf=0, neginf=0).astype(np.int64)
    codes += is_outlier[..., None] & (codes % 256 == 128)  # so that no low byte is -128
    return codes.reshape(x_MI.shape), scale[..., 0]
