"""Dequantize GGUF blocks, bit-identical to ggml: one definition for NumPy and PyTorch.

The decoders use only functions that `numpy` and `torch` have under the same name, and get the module as `xp`. So the
base installation decodes with NumPy, and PyTorch decodes on any device.

Each format takes a few lines: split the block into its fields, join the bits of the codes, and apply the scales in
float32 in ggml's order of operations. The order matters: `(d * q) + m` with two roundings is the reference, a fused
multiply-add is not.

Codes are packed in one pattern everywhere: the bytes of a run hold field 0 of the first weights, field 1 of the next,
and so on. For 4-bit codes in a block of 32, byte i holds weight i in its low half and weight i + 16 in its high half.
`fields` undoes that for every width.

A cache-sized piece of the tensor is decoded at a time: all intermediate values of a piece stay in L2, and only packed
bytes and results travel to memory.

Source: ggml-quants.c, `dequantize_row_*`. The tests compare with `gguf.quants`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamarium.errors import CheckpointError
from llamarium.quant.formats import IQ4_NL_VALUES, block_format
from llamarium.quant.ggml.decode_iq import iq1_m, iq1_s, iq2_s, iq2_xs, iq2_xxs, iq3_s, iq3_xxs
from llamarium.quant.ggml.fields import copy, fields, half, to_float

# Weights per piece: 1 MiB of float32, which fits the second-level cache.
_PIECE_WEIGHTS = 2**18


def decode_blocks(
    type_name: str, data: NDArray[np.uint8], num_columns: int, out: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """Decode packed rows, uint8 in any shape, of a type in `GGML_TYPES` with NumPy: (rows, num_columns).

    `out`: contiguous, of the result's size; overwritten and returned.
    """
    row_bytes = block_format(type_name).row_bytes(num_columns)
    if data.dtype != np.uint8 or row_bytes == 0 or data.size % row_bytes:
        raise CheckpointError(
            f"{type_name} weights are {data.dtype} {data.shape}; expected uint8, a multiple of {row_bytes} bytes"
        )
    out = np.empty((data.size // row_bytes, num_columns), np.float32) if out is None else out
    with np.errstate(all="ignore"):  # infinite and NaN scales are reported where files are checked
        decode_into(np, data, type_name, out)
    return out


def decode_into(xp: Any, data: Any, type_name: str, out: Any) -> None:
    """Decode whole blocks into an array or a tensor of any floating-point dtype.

    Args:
        xp: `numpy` or `torch`: the module of the arrays.
        data: uint8, the blocks in any shape.
        type_name: A key of `GGML_TYPES`.
        out: Contiguous; overwritten. The arithmetic is float32, and the result is rounded once.
    """
    block = block_format(type_name)
    blocks, values = data.reshape(-1, block.block_bytes), out.reshape(-1, block.block_size)
    step = _PIECE_WEIGHTS // block.block_size
    for start in range(0, len(blocks), step):
        values[start : start + step] = _DECODERS[type_name](xp, blocks[start : start + step])


def _bf16(xp: Any, blocks: Any) -> Any:
    """A bfloat16 is the upper half of a float32; numpy has no such dtype."""
    return (xp.asarray(copy(xp, blocks).view(xp.int16), dtype=xp.int32) << 16).view(xp.float32)


def _q8_0(xp: Any, blocks: Any) -> Any:
    """Block: d half, 32 signed bytes. w = q * d."""
    return to_float(xp, blocks[:, 2:].view(xp.int8)) * half(xp, blocks, 0)


def _q4_0(xp: Any, blocks: Any) -> Any:
    """Block: d half, 16 bytes of 4-bit codes. w = d * (q - 8)."""
    return (to_float(xp, fields(xp, blocks[:, 2:], 4, 16)) - 8) * half(xp, blocks, 0)


def _q4_1(xp: Any, blocks: Any) -> Any:
    """Block: d and m half, 16 bytes of 4-bit codes. w = d * q + m."""
    return to_float(xp, fields(xp, blocks[:, 4:], 4, 16)) * half(xp, blocks, 0) + half(xp, blocks, 2)


def five_bit_codes(xp: Any, high: Any, low: Any) -> Any:
    """Join (n, 4) bytes of fifth bits, in the weights' order, and (n, 16) bytes of 4-bit codes."""
    return (fields(xp, high, 1, 1) << 4) | fields(xp, low, 4, 16)


def _q5_0(xp: Any, blocks: Any) -> Any:
    """Block: d half, 4 bytes of fifth bits, 16 bytes of low bits. w = d * (q - 16)."""
    return (to_float(xp, five_bit_codes(xp, blocks[:, 2:6], blocks[:, 6:])) - 16) * half(xp, blocks, 0)


def _q5_1(xp: Any, blocks: Any) -> Any:
    """Block: d and m half, 4 bytes of fifth bits, 16 bytes of low bits. w = d * q + m."""
    codes = to_float(xp, five_bit_codes(xp, blocks[:, 4:8], blocks[:, 8:]))
    return codes * half(xp, blocks, 0) + half(xp, blocks, 2)


def _iq4_values(xp: Any, codes: Any) -> Any:
    """Return the values of IQ4_NL or IQ4_XS codes, float32."""
    levels = xp.asarray(IQ4_NL_VALUES, dtype=xp.float32)
    levels = levels if xp is np else levels.to(codes.device)
    return xp.take(levels, xp.asarray(codes, dtype=xp.int64))


def _iq4_nl(xp: Any, blocks: Any) -> Any:
    """Block: d half, 16 bytes of indices into `IQ4_NL_VALUES`. w = d * value."""
    return _iq4_values(xp, fields(xp, blocks[:, 2:], 4, 16)) * half(xp, blocks, 0)


def _by_sub_block(xp: Any, codes: Any, scale: Any, offset: Any = None) -> Any:
    """Return `scale * codes - offset`, (n, 256) float32, with scale and offset (n, sub-blocks)."""
    values = to_float(xp, codes).reshape(*scale.shape, codes.shape[1] // scale.shape[1]) * scale[..., None]
    if offset is not None:
        values -= offset[..., None]
    return values.reshape(codes.shape)


def _q2_k(xp: Any, blocks: Any) -> Any:
    """Block: 16 bytes of 4-bit (scale, min), 64 bytes of 2-bit codes, d and dmin half; 16 sub-blocks of 16."""
    scale = half(xp, blocks, 80) * to_float(xp, blocks[:, :16] & 15)
    offset = half(xp, blocks, 82) * to_float(xp, blocks[:, :16] >> 4)
    return _by_sub_block(xp, fields(xp, blocks[:, 16:80], 2, 32), scale, offset)


def _q3_k(xp: Any, blocks: Any) -> Any:
    """Block: 32 bytes of third bits, 64 bytes of 2-bit codes, 12 bytes of 6-bit scales, d half; 16 sub-blocks.

    If the third bit is not set, 4 is subtracted, so codes are -4 to 3. Scales are -32 to 31: 8 bytes hold
    their low four bits, 4 bytes their high two.
    """
    scales = fields(xp, blocks[:, 96:104], 4, 8) | (fields(xp, blocks[:, 104:108], 2, 4) << 4)
    codes = fields(xp, blocks[:, 32:96], 2, 32) | (fields(xp, blocks[:, :32], 1, 32) << 2)
    return _by_sub_block(xp, to_float(xp, codes) - 4, half(xp, blocks, 108) * (to_float(xp, scales) - 32))


@dataclass(frozen=True, slots=True)
class SuperBlocks:
    """Fields of n blocks of Q4_K, Q5_K, Q6_K or IQ4_XS, as arrays or tensors.

    A weight is `d * scale * code - dmin * minimum`. Q6_K and IQ4_XS have no minima: their weights are
    `d * scale * (code - 32)` and `d * scale * IQ4_NL_VALUES[code]`.

    Attributes:
        codes: uint8, (n, 256).
        scales: One per sub-block: uint8 (n, 8), or int8 (n, 16) in Q6_K and (n, 8) in IQ4_XS.
        d: float16, (n, 1).
        minima: uint8, (n, 8), or None.
        dmin: float16, (n, 1), or None.
    """

    codes: Any
    scales: Any
    d: Any
    minima: Any = None
    dmin: Any = None


def super_blocks(xp: Any, blocks: Any, type_name: str) -> SuperBlocks:
    """Split blocks of Q4_K, Q5_K, Q6_K or IQ4_XS, uint8 (n, bytes of a block), into their fields."""
    if type_name == "IQ4_XS":
        high, low = fields(xp, blocks[:, 2:4], 2, 1), fields(xp, blocks[:, 4:8], 4, 1)
        scales = (low | (high << 4)) - 32  # wraps around, which is what int8 makes of it
        return SuperBlocks(
            fields(xp, blocks[:, 8:], 4, 16), scales.view(xp.int8), copy(xp, blocks[:, :2]).view(xp.float16)
        )
    if type_name == "Q6_K":
        codes = fields(xp, blocks[:, :128], 4, 64) | (fields(xp, blocks[:, 128:192], 2, 32) << 4)
        scales, d = copy(xp, blocks[:, 192:208]), copy(xp, blocks[:, 208:])
        return SuperBlocks(codes, scales.view(xp.int8), d.view(xp.float16))
    codes = fields(xp, blocks[:, -128:], 4, 32)
    if type_name == "Q5_K":
        codes |= fields(xp, blocks[:, 16:48], 1, 32) << 4
    halves = copy(xp, blocks[:, :4]).view(xp.float16)
    scales, minima = _six_bit_pairs(xp, blocks[:, 4:16])
    return SuperBlocks(codes, scales, halves[:, :1], minima, halves[:, 1:])


def _six_bit_pairs(xp: Any, packed: Any) -> tuple[Any, Any]:
    """Unpack the 8 scales and 8 mins of Q4_K and Q5_K, 6 bits each in 12 bytes.

    Bytes 0-3 hold scales 0-3 and bytes 4-7 mins 0-3 in their low six bits. The high two bits of these bytes are the
    high bits of scales and mins 4-7, whose low four bits are the halves of bytes 8-11.
    """
    first, second, low = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = xp.concatenate((first & 63, (low & 15) | ((first >> 2) & 48)), 1)
    return scales, xp.concatenate((second & 63, (low >> 4) | ((second >> 2) & 48)), 1)


def _with_minima(xp: Any, parts: SuperBlocks) -> Any:
    offset = to_float(xp, parts.dmin) * to_float(xp, parts.minima)
    return _by_sub_block(xp, parts.codes, to_float(xp, parts.d) * to_float(xp, parts.scales), offset)


def _q4_k(xp: Any, blocks: Any) -> Any:
    """Block: d and dmin half, 12 bytes of 6-bit (scale, min), 128 bytes of 4-bit codes; 8 sub-blocks of 32."""
    return _with_minima(xp, super_blocks(xp, blocks, "Q4_K"))


def _q5_k(xp: Any, blocks: Any) -> Any:
    """Block: as Q4_K with 32 bytes of fifth bits before the low bits."""
    return _with_minima(xp, super_blocks(xp, blocks, "Q5_K"))


def _q6_k(xp: Any, blocks: Any) -> Any:
    """Block: 128 bytes of low bits, 64 bytes of high two bits, 16 signed scales, d half; 16 sub-blocks of 16."""
    parts = super_blocks(xp, blocks, "Q6_K")
    return _by_sub_block(xp, to_float(xp, parts.codes) - 32, to_float(xp, parts.d) * to_float(xp, parts.scales))


def _iq4_xs(xp: Any, blocks: Any) -> Any:
    """Block: d half, 2 bytes of high bits and 4 bytes of low bits of 8 scales, 128 bytes of 4-bit codes."""
    parts = super_blocks(xp, blocks, "IQ4_XS")
    return _by_sub_block(xp, _iq4_values(xp, parts.codes), to_float(xp, parts.d) * to_float(xp, parts.scales))


_DECODERS: dict[str, Callable[[Any, Any], Any]] = {
    "F32": lambda xp, blocks: copy(xp, blocks).view(xp.float32),
    "F16": lambda xp, blocks: half(xp, blocks, 0),
    "BF16": _bf16,
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "IQ3_S": iq3_s,
    "IQ3_XXS": iq3_xxs,
    "IQ2_S": iq2_s,
    "IQ2_XS": iq2_xs,
    "IQ2_XXS": iq2_xxs,
    "IQ1_M": iq1_m,
    "IQ1_S": iq1_s,
}
