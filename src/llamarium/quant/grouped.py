"""Group-quantized integers, stored in several tensors: the weights of AWQ, GPTQ and compressed-tensors.

A weight is `(q - z) * scale`: q is an unsigned code of 2 to 8 bits, and each group of columns of a row has a scale and
a zero point z. The three formats differ only in how they pack codes into 32-bit words:

- AWQ: (in, out / 8), eight codes of a row of the file per word, the even columns before the odd ones;
- GPTQ: (in * bits / 32, out), the codes of an output feature along a column;
- compressed-tensors, and AWQ's GEMV layout: (out, in * bits / 32), the codes of an output feature along a row.

Readers pass the codes as stored in the file, and scales and zero points by output feature, (out, groups). With
`groups`, columns are assigned to groups in any order (GPTQ's act-order); without it, the groups divide a row equally.

Blocks of GGUF's Q4_0, Q5_0 and Q8_0 store a float16 scale and integers of 4, 5 or 8 bits. Weights whose scales are
exact in float16, and whose q - z fit, are converted to such blocks without loss, and the C kernels multiply them.

Source: AutoAWQ, `awq/utils/packing_utils.py` and `modules/linear/gemm.py`; AutoGPTQ, `qlinear_cuda.py`;
compressed-tensors, `compressors/pack_quantized`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamarium.quant.formats import GROUP
from llamarium.quant.ggml.decode import to_float

Parts = Mapping[str, Any]
"""The arrays of a weight: `data`, the packed codes, uint8 rows as in the file; `scales` and `zeros`, (out, groups); and
with act-order `groups`, (in,), the group of each column."""

Shape = tuple[int, ...]
Unpack = Callable[[Any, Any, Shape, int, int], Any]
"""Called with (xp, data, shape, start, stop): the codes of output features `start` to `stop`, uint8 (n, in)."""

_EXACT_TYPES = (("Q4_0", -8, 7), ("Q5_0", -16, 15), ("Q8_0", -128, 127))
"""GGUF types whose weights are an integer times a float16 scale, with the range of the integer."""

_PIECE_WEIGHTS = 2**20


def unpack_bits(xp: Any, packed: Any, num_bits: int, count: int) -> Any:
    """Unpack `count` codes of `num_bits` (2 to 8) from each row of bytes, lowest bits first.

    Args:
        xp: The module of the array, `numpy` or `torch`.
        packed: uint8 (n, bytes); bytes after the last code are ignored.
        num_bits: Bits per code; a code may span two bytes.
        count: Codes per row.

    Returns:
        uint8 (n, count).
    """
    num_bytes = -(-count // 8) * num_bits  # eight codes are `num_bits` bytes
    runs = packed[:, :num_bytes]
    if runs.shape[1] < num_bytes:
        runs = xp.concatenate((runs, xp.zeros_like(packed[:, : num_bytes - runs.shape[1]])), 1)
    if num_bits == 8:
        return runs[:, :count]
    runs = runs.reshape(len(runs), -1, num_bits)

    codes: list[Any] = []
    for first in range(0, 8 * num_bits, num_bits):
        byte, shift = divmod(first, 8)
        code = runs[..., byte] >> shift
        if shift + num_bits > 8:
            code = code | (runs[..., byte + 1] << (8 - shift))
        codes.append(code & (2**num_bits - 1))
    return xp.stack(codes, -1).reshape(len(packed), -1)[:, :count]


def unpack_awq(xp: Any, data: Any, shape: Shape, start: int, stop: int) -> Any:
    """Unpack codes or zero points in AWQ's GEMM layout: data (in, out / 2) bytes; see `Unpack`."""
    first = start // 8
    last = -(-stop // 8)
    octets = _columns(xp, data, first, last).reshape(last - first, -1, 4)

    fields: list[Any] = []
    for column in range(8):  # order of columns in a word: 0 2 4 6 1 3 5 7
        place = column // 2 + 4 * (column % 2)
        octet = octets[..., place // 2]
        fields.append(octet >> 4 if place % 2 else octet & 15)
    return xp.stack(fields, 1).reshape(8 * len(octets), -1)[start - 8 * first : stop - 8 * first]


def _columns(xp: Any, data: Any, start: int, stop: int) -> Any:
    """Return columns `start` to `stop` of 32-bit words as bytes, column by column: uint8 (bytes,)."""
    words = data.view(xp.int32)[:, start:stop].T.reshape(-1)
    return xp.concatenate((words,), 0).view(xp.uint8)  # a copy, because a column is not contiguous


def unpack_down(num_bits: int) -> Unpack:
    """Return the function that unpacks GPTQ's codes of `num_bits`: data (in * num_bits / 32, 4 * out) bytes."""

    def unpack(xp: Any, data: Any, shape: Shape, start: int, stop: int) -> Any:
        return unpack_bits(xp, _columns(xp, data, start, stop).reshape(stop - start, -1), num_bits, shape[1])

    return unpack


def unpack_along(num_bits: int) -> Unpack:
    """Return the function that unpacks codes of `num_bits` along rows: data (out, bytes), padded to whole words."""
    return lambda xp, data, shape, start, stop: unpack_bits(xp, data[start:stop], num_bits, shape[1])


def decode_groups(unpack: Unpack, xp: Any, parts: Parts, shape: Shape, start: int, stop: int) -> Any:
    """Dequantize rows `start` to `stop` of a weight, float32 (stop - start, in).

    The result is exact for float16 and bfloat16 scales, whose products fit into float32.
    """
    codes = to_float(xp, unpack(xp, parts["data"], shape, start, stop))
    scales, zeros = (to_float(xp, parts[name][start:stop]) for name in ("scales", "zeros"))
    if "groups" in parts:
        groups = parts["groups"]
        return (codes - zeros[:, groups]) * scales[:, groups]
    codes = codes.reshape(*scales.shape, -1)
    return ((codes - zeros[..., None]) * scales[..., None]).reshape(stop - start, -1)


def exact_type(unpack: Unpack, num_bits: int, parts: Parts, shape: Shape) -> str | None:
    """Return the GGUF type that represents a weight exactly; None if there is none.

    Args:
        unpack: Function that unpacks its codes.
        num_bits: Bits per code.
        parts: Its arrays, in numpy.
        shape: (out, in).
    """
    if not _shares_scales(parts, shape) or not _are_halves(parts["scales"]):
        return None
    zeros = parts["zeros"]
    low, high = -int(zeros.max()), 2**num_bits - 1 - int(zeros.min())
    if num_bits == 8 and (low < -128 or high > 127):  # depends on the codes that occur
        low, high = _range_of(unpack, parts, shape)
    return next((name for name, min_code, max_code in _EXACT_TYPES if min_code <= low and high <= max_code), None)


def group_blocks(
    unpack: Unpack, parts: Parts, shape: Shape, start: int, stop: int, type_name: str
) -> NDArray[np.uint8]:
    """Convert rows `start` to `stop` to GGUF blocks of the type that `exact_type` returned: uint8 (n, row bytes)."""
    integers = _integers(unpack, parts, shape, start, stop).reshape(stop - start, -1, GROUP)
    scales = parts["scales"][start:stop].astype(np.float16)
    if "groups" in parts:
        scales = scales[:, parts["groups"][::GROUP]]
    else:
        scales = scales.repeat(integers.shape[1] // scales.shape[1], axis=1)
    fields: list[NDArray[Any]] = [np.ascontiguousarray(scales).view(np.uint8).reshape(*integers.shape[:2], 2)]
    if type_name == "Q8_0":
        fields.append(integers.astype(np.int8).view(np.uint8))
    else:
        codes = (integers + (8 if type_name == "Q4_0" else 16)).astype(np.uint8)
        if type_name == "Q5_0":
            fields.append(np.packbits(codes >> 4, axis=-1, bitorder="little"))
        fields.append((codes[..., :16] & 15) | (codes[..., 16:] << 4))
    return np.concatenate(fields, -1).reshape(stop - start, -1)


def _shares_scales(parts: Parts, shape: Shape) -> bool:
    """Return whether each block of 32 columns has one scale and one zero point."""
    if shape[1] % GROUP:
        return False
    if "groups" not in parts:
        return shape[1] // parts["scales"].shape[1] % GROUP == 0
    groups = parts["groups"].reshape(-1, GROUP)
    return bool((groups == groups[:, :1]).all())


def _are_halves(scales: NDArray[Any]) -> bool:
    """Return whether all scales are exact in float16."""
    if scales.dtype == np.float16:
        return True
    with np.errstate(over="ignore"):
        halves = scales.astype(np.float16)
    return bool(np.array_equal(halves.astype(np.float32), scales, equal_nan=True))


def _integers(unpack: Unpack, parts: Parts, shape: Shape, start: int, stop: int) -> NDArray[np.int16]:
    """Return q - z of some rows: int16 (n, in)."""
    codes = unpack(np, parts["data"], shape, start, stop).astype(np.int16)
    zeros = parts["zeros"][start:stop].astype(np.int16)
    if "groups" in parts:
        return codes - zeros[:, parts["groups"]]
    return (codes.reshape(*zeros.shape, -1) - zeros[..., None]).reshape(codes.shape)


def _range_of(unpack: Unpack, parts: Parts, shape: Shape) -> tuple[int, int]:
    """Return the smallest and the largest q - z of a weight."""
    low, high = 0, 0
    step = max(1, _PIECE_WEIGHTS // shape[1])
    for start in range(0, shape[0], step):
        piece = _integers(unpack, parts, shape, start, min(start + step, shape[0]))
        low, high = min(low, int(piece.min())), max(high, int(piece.max()))
    return low, high
