"""Packing of blocks into tiles for the C kernels, and dequantization of both. Torch-free.

`quant/formats.py` has the table of types, and `native/tiles.h` defines the layout of a tile. The kernels do the work;
without them, `parts_of_rows` in `quant/codes.py` unpacks tiles.
"""

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamarium.kernels import native, structs
from llamarium.quant.formats import FORMATS, TILE_ROWS, PackedFormat
from llamarium.quant.ggml.decode import decode_blocks

Bytes = NDArray[np.uint8]

_HALF_EXPONENT, _BFLOAT_EXPONENT = 0x7C00, 0x7F80
_PIECE = 2**18  # values processed at a time, so that temporaries stay in the processor's cache


def pack_blocks(blocks: Bytes, num_columns: int, format: PackedFormat) -> Bytes:
    """Pack GGUF blocks, (rows, bytes per row), into tiles (panels, tiles, tile_bytes), without loss.

    Requires the C kernels.
    """
    tiles = np.empty((-(-len(blocks) // TILE_ROWS), num_columns // format.columns, format.tile_bytes), dtype=np.uint8)
    native.pack(structs.Kind(format.kind), num_columns, blocks, tiles)
    return tiles


def pack_groups(groups: tuple[Bytes, NDArray[np.float16], NDArray[np.float16] | None], format: PackedFormat) -> Bytes:
    """Pack codes, scales and minima into tiles (panels, tiles, tile_bytes).

    Args:
        groups: Codes (rows, columns) below `num_levels`; scales, and minima if the format has them, both
            (rows, columns / 32).
        format: A type of 4 or 8 bits with groups of 32 columns.
    """
    codes, *halves = groups
    num_rows = len(codes)
    panels = -(-num_rows // TILE_ROWS)
    codes = codes.reshape(num_rows, -1, 32)
    if format.num_levels == 16:
        codes = codes[..., :16] | codes[..., 16:] << 4
    parts = codes.view(np.int32), np.stack([part for part in halves if part is not None], axis=-1).view(np.int16)

    def in_tiles(part: NDArray[Any]) -> Bytes:
        rows = np.zeros((panels * TILE_ROWS, *part.shape[1:]), part.dtype)
        rows[:num_rows] = part
        rows = rows.reshape(panels, TILE_ROWS, *part.shape[1:]).transpose(0, 2, 3, 1)
        return np.ascontiguousarray(rows).reshape(panels, part.shape[1], -1).view(np.uint8)

    return np.concatenate([*map(in_tiles, parts)], axis=-1)


def matrix_of(type_name: str, shape: tuple[int, ...], address: int) -> structs.CMatrix:
    """Return a descriptor for the kernels of a matrix (out, in), in tiles or in rows of floats, at an address.

    It is valid as long as the memory is.
    """
    levels = _levels(type_name)
    return structs.CMatrix(structs.Kind[type_name], *shape, address, None if levels is None else levels.ctypes.data)


@functools.cache
def _levels(type_name: str) -> NDArray[np.uint8] | None:
    """Return the values of a type's codes plus 128, for the kernels; cached, because the kernels keep its address."""
    levels = getattr(FORMATS[type_name], "levels", None)
    return None if levels is None else np.array([level + 128 for level in levels], np.uint8)


def dequantize(
    type_name: str, shape: tuple[int, ...], data: Bytes, out: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """Dequantize a stored weight to float32; types in `structs.Kind` are dequantized by the kernels, in threads.

    Args:
        type_name: Name in `FORMATS`.
        shape: Logical shape, (out, in) or (hidden,).
        data: C-contiguous: rows of GGUF blocks, or tiles with three dimensions, which need the kernels.
        out: Contiguous array of `shape`; overwritten and returned.
    """
    out = np.empty(shape, np.float32) if out is None else out
    is_packed = data.ndim == 3
    if not is_packed and (len(shape) == 1 or type_name not in structs.Kind.__members__ or native.library() is None):
        decode_blocks(type_name, data, shape[-1], out)
        return out
    if not is_packed and isinstance(format := FORMATS[type_name], PackedFormat):
        data = pack_blocks(data, shape[1], format)
    return native.lookup(matrix_of(type_name, shape, data.ctypes.data), np.arange(shape[0]), out)


def count_nonfinite_tiles(tiles: Bytes, format: PackedFormat) -> int:
    """Count the weights whose scale or minimum is NaN or infinite; codes are always finite."""
    start = 0 if format.is_super else format.code_bytes // 2
    stop = start + format.half_bytes // 2
    halves = tiles.view(np.uint16)[..., start:stop].reshape(-1, stop - start)
    num_nonfinite = 0
    for i in range(0, len(halves), step := max(1, _PIECE // (stop - start))):
        exponents = halves[i : i + step] & _HALF_EXPONENT
        if exponents.max(initial=0) == _HALF_EXPONENT:
            blocks = (exponents == _HALF_EXPONENT).reshape(len(exponents), -1, TILE_ROWS).any(axis=1)
            num_nonfinite += int(np.count_nonzero(blocks)) * format.columns
    return num_nonfinite


def count_nonfinite(values: NDArray[Any]) -> int:
    """Count the NaN and infinite values of an array of floats, or of bfloat16 bits in uint16."""
    flat = values.reshape(-1)
    pieces = (flat[i : i + _PIECE] for i in range(0, flat.size, _PIECE))
    if values.dtype == np.uint16:
        return sum(map(_count_nonfinite_bfloat16, pieces))
    return sum(piece.size - int(np.count_nonzero(np.isfinite(piece))) for piece in pieces)


def _count_nonfinite_bfloat16(bits: NDArray[np.uint16]) -> int:
    magnitudes = bits & 0x7FFF  # infinity and NaN have the largest bits
    if magnitudes.max() < _BFLOAT_EXPONENT:  # the usual case
        return 0
    return int(np.count_nonzero(magnitudes >= _BFLOAT_EXPONENT))


def to_bfloat16(values: NDArray[Any]) -> NDArray[np.uint16]:
    """Round float16 or float32 to bfloat16, to nearest, ties to even; return the bits as uint16."""
    out = np.empty(values.shape, dtype=np.uint16)
    flat, flat_out = values.reshape(-1), out.reshape(-1)
    for i in range(0, flat.size, _PIECE):
        piece = flat[i : i + _PIECE].astype(np.float32)
        bits = piece.view(np.uint32)
        flat_out[i : i + _PIECE] = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
        flat_out[i : i + _PIECE][np.isnan(piece)] = 0x7FC0
    return out


def to_float32(values: NDArray[Any]) -> NDArray[np.float32]:
    """Convert float16, or bfloat16 bits in uint16, to float32; float32 is returned unchanged."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32, copy=False)
