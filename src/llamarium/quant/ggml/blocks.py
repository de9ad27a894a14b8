"""From GGUF blocks back to weights, in plain torch and bit for bit as ggml does it.

The work of one format is a few lines: cut the block into its fields, glue the bits of the codes together, and apply
the scales in float32 in ggml's order of operations. The order matters: `(d * q) + m` with two roundings is the
reference, a fused multiply-add is not.

Codes are packed in one pattern everywhere: the bytes of a run hold field 0 of the first weights, field 1 of the next,
and so on. For 4-bit codes in a block of 32, byte i holds weight i in its low half and weight i + 16 in its high half.
`_fields` undoes that for every width.

Speed comes from doing a cache-sized piece of the tensor at a time: all intermediate values of a piece stay in L2,
and only packed bytes and results travel to memory.

Source: ggml-quants.c, `dequantize_row_*`; held to `gguf.quants` by the tests.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from llamarium.errors import CheckpointError
from llamarium.quant.formats import IQ4_NL_VALUES, block_format

# Weights per piece: 1 MiB of float32, which fits the second-level cache of two threads.
_PIECE_WEIGHTS = 2**18

"""The sixteen levels of IQ4_NL, denser near zero (ggml-common.h, `kvalues_iq4nl`)."""


def dequantize(
    packed: Tensor, type_name: str, dtype: torch.dtype = torch.float32, *, out: Tensor | None = None
) -> Tensor:
    """Turn packed rows into weights.

    Args:
        packed: uint8, (..., row_bytes).
        type_name: A key of `GGML_TYPES`.
        dtype: Of the result. The arithmetic is float32 always; the result is rounded once.
        out: Contiguous (..., columns); written instead of a new tensor, in its own dtype.

    Returns:
        (..., columns).

    Raises:
        UnsupportedFormatError: If the format is not read.
        CheckpointError: If `packed` is no uint8 or its rows are no whole number of blocks.
    """
    block = block_format(type_name)
    if packed.dtype != torch.uint8 or packed.ndim == 0:
        raise CheckpointError(f"{type_name} weights are {packed.dtype} {tuple(packed.shape)}; expected rows of uint8")
    shape = (*packed.shape[:-1], block.num_columns(packed.shape[-1]))
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=packed.device)
    assert out.shape == shape and out.is_contiguous()
    blocks, values = packed.reshape(-1, block.block_bytes), out.view(-1, block.block_size)
    step = _PIECE_WEIGHTS // block.block_size
    for start in range(0, len(blocks), step):
        values[start : start + step] = _DECODERS[type_name](blocks[start : start + step])
    return out


def _view(blocks: Tensor, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """Read bytes `start` to `stop` of each block as numbers, in float32."""
    # The copy makes the bytes contiguous and aligned; scales are a small part of a block.
    return blocks[:, start:stop].clone(memory_format=torch.contiguous_format).view(dtype).float()


def _half(blocks: Tensor, start: int) -> Tensor:
    """Read one half-precision scale of each block: (n, 1), float32."""
    return _view(blocks, start, start + 2, torch.float16)


def _fields(packed: Tensor, num_bits: int, run: int) -> Tensor:
    """Split bytes into fields of `num_bits`, lowest first.

    Args:
        packed: uint8, (n, bytes).
        num_bits: 1, 2 or 4.
        run: Within each run of so many bytes, field 0 of all bytes comes first, then field 1, ...

    Returns:
        uint8, (n, bytes * 8 / num_bits).
    """
    mask = (1 << num_bits) - 1
    # A byte operation on a contiguous tensor is ten times as fast as on a slice of each block.
    runs = packed.contiguous().view(len(packed), -1, run)
    return torch.stack([(runs >> shift) & mask for shift in range(0, 8, num_bits)], dim=2).flatten(1)


def _f32(blocks: Tensor) -> Tensor:
    return _view(blocks, 0, 4, torch.float32)


def _f16(blocks: Tensor) -> Tensor:
    return _view(blocks, 0, 2, torch.float16)


def _bf16(blocks: Tensor) -> Tensor:
    return _view(blocks, 0, 2, torch.bfloat16)


def _q8_0(blocks: Tensor) -> Tensor:
    """Block: d half, 32 signed bytes. w = q * d."""
    return blocks[:, 2:].view(torch.int8).float().mul_(_half(blocks, 0))


def _q4_0(blocks: Tensor) -> Tensor:
    """Block: d half, 16 bytes of 4-bit codes. w = d * (q - 8)."""
    return _fields(blocks[:, 2:], 4, 16).float().sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: Tensor) -> Tensor:
    """Block: d and m half, 16 bytes of 4-bit codes. w = d * q + m."""
    return _fields(blocks[:, 4:], 4, 16).float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def five_bit_codes(high: Tensor, low: Tensor) -> Tensor:
    """Join (n, 4) bytes of fifth bits, in the weights' order, and (n, 16) bytes of 4-bit codes."""
    return (_fields(high, 1, 1) << 4) | _fields(low, 4, 16)


def _q5_0(blocks: Tensor) -> Tensor:
    """Block: d half, 4 bytes of fifth bits, 16 bytes of low bits. w = d * (q - 16)."""
    return five_bit_codes(blocks[:, 2:6], blocks[:, 6:]).float().sub_(16).mul_(_half(blocks, 0))


def _q5_1(blocks: Tensor) -> Tensor:
    """Block: d and m half, 4 bytes of fifth bits, 16 bytes of low bits. w = d * q + m."""
    return five_bit_codes(blocks[:, 4:8], blocks[:, 8:]).float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _iq4_nl(blocks: Tensor) -> Tensor:
    """Block: d half, 16 bytes of indices into `IQ4_NL_VALUES`. w = d * value."""
    levels = torch.tensor(IQ4_NL_VALUES, dtype=torch.float32, device=blocks.device)
    codes = _fields(blocks[:, 2:], 4, 16)
    # index_select with int32 is an order of magnitude faster than levels[codes].
    return levels.index_select(0, codes.int().flatten()).view(codes.shape).mul_(_half(blocks, 0))


def _by_sub_block(codes: Tensor, scale: Tensor, offset: Tensor | None = None) -> Tensor:
    """Return `scale * codes - offset`, (n, 256) float32, with scale and offset (n, sub-blocks)."""
    values = codes.view(*scale.shape, -1).float().mul_(scale.unsqueeze(-1))
    if offset is not None:
        values.sub_(offset.unsqueeze(-1))
    return values.flatten(1)


def _q2_k(blocks: Tensor) -> Tensor:
    """Block: 16 bytes of 4-bit (scale, min), 64 bytes of 2-bit codes, d and dmin half; 16 sub-blocks of 16."""
    scale = _half(blocks, 80) * (blocks[:, :16] & 15).float()
    offset = _half(blocks, 82) * (blocks[:, :16] >> 4).float()
    return _by_sub_block(_fields(blocks[:, 16:80], 2, 32), scale, offset)


def _q3_k(blocks: Tensor) -> Tensor:
    """Block: 32 bytes of third bits, 64 bytes of 2-bit codes, 12 bytes of 6-bit scales, d half; 16 sub-blocks.

    A third bit that is not set means minus 4, so codes run from -4 to 3. Scales run from -32 to 31: 8 bytes hold
    their low four bits, 4 bytes their high two.
    """
    scales = _fields(blocks[:, 96:104], 4, 8) | (_fields(blocks[:, 104:108], 2, 4) << 4)
    codes = _fields(blocks[:, 32:96], 2, 32) | (_fields(blocks[:, :32], 1, 32) << 2)
    return _by_sub_block(codes.float().sub_(4), _half(blocks, 108) * scales.float().sub_(32))


@dataclass(frozen=True, slots=True)
class SuperBlocks:
    """n blocks of Q4_K, Q5_K or Q6_K, as the integers and halves that they hold.

    A weight is `d * scale * code - dmin * minimum`, and of Q6_K, which has no minima, `d * scale * (code - 32)`.

    Attributes:
        codes: uint8, (n, 256).
        scales: One a sub-block: uint8 (n, 8), or int8 (n, 16) in Q6_K.
        d: float16, (n, 1).
        minima: uint8, (n, 8), or None.
        dmin: float16, (n, 1), or None.
    """

    codes: Tensor
    scales: Tensor
    d: Tensor
    minima: Tensor | None = None
    dmin: Tensor | None = None


def super_blocks(blocks: Tensor, type_name: str) -> SuperBlocks:
    """Take blocks of Q4_K, Q5_K or Q6_K, uint8 (n, bytes of a block), apart."""
    if type_name == "Q6_K":
        codes = _fields(blocks[:, :128], 4, 64) | (_fields(blocks[:, 128:192], 2, 32) << 4)
        scales, d = blocks[:, 192:208].contiguous(), blocks[:, 208:].contiguous()
        return SuperBlocks(codes, scales.view(torch.int8), d.view(torch.float16))
    codes = _fields(blocks[:, -128:], 4, 32)
    if type_name == "Q5_K":
        codes |= _fields(blocks[:, 16:48], 1, 32) << 4
    halves = blocks[:, :4].contiguous().view(torch.float16)
    scales, minima = _six_bit_pairs(blocks[:, 4:16])
    return SuperBlocks(codes, scales, halves[:, :1], minima, halves[:, 1:])


def _six_bit_pairs(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack the 8 scales and 8 mins of Q4_K and Q5_K, 6 bits each in 12 bytes.

    Bytes 0-3 hold scales 0-3 and bytes 4-7 mins 0-3 in their low six bits. The high two bits of these bytes are the
    high bits of scales and mins 4-7, whose low four bits are the halves of bytes 8-11.
    """
    first, second, low = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat((first & 63, (low & 15) | ((first >> 2) & 48)), dim=-1)
    mins = torch.cat((second & 63, (low >> 4) | ((second >> 2) & 48)), dim=-1)
    return scales, mins


def _q4_k(blocks: Tensor) -> Tensor:
    """Block: d and dmin half, 12 bytes of 6-bit (scale, min), 128 bytes of 4-bit codes; 8 sub-blocks of 32."""
    return _with_minima(super_blocks(blocks, "Q4_K"))


def _q5_k(blocks: Tensor) -> Tensor:
    """Block: as Q4_K with 32 bytes of fifth bits before the low bits."""
    return _with_minima(super_blocks(blocks, "Q5_K"))


def _with_minima(parts: SuperBlocks) -> Tensor:
    assert parts.dmin is not None and parts.minima is not None
    offset = parts.dmin.float() * parts.minima.float()
    return _by_sub_block(parts.codes, parts.d.float() * parts.scales.float(), offset)


def _q6_k(blocks: Tensor) -> Tensor:
    """Block: 128 bytes of low bits, 64 bytes of high two bits, 16 signed scales, d half; 16 sub-blocks of 16."""
    parts = super_blocks(blocks, "Q6_K")
    return _by_sub_block(parts.codes.float().sub_(32), parts.d.float() * parts.scales.float())


_DECODERS: dict[str, Callable[[Tensor], Tensor]] = {
    "F32": _f32,
    "F16": _f16,
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
}
