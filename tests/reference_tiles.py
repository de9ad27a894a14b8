"""Packing in PyTorch: the readable counterpart of `native/pack.c`, which the tests hold it to; and definitions of
`quant/codes.py` with tensors."""

import numpy as np
import torch
from torch import Tensor

from llamarium.quant import codes as definitions
from llamarium.quant.formats import GROUP, PACKED_FORMATS, TILE_ROWS, PackedFormat, block_format
from llamarium.quant.ggml.decode import SuperBlocks, five_bit_codes, super_blocks
from llamarium.quant.ggml.encode import encode_reference
from llamarium.quant.packed import LinearPacked
from llamarium.quant.packing import pack_blocks


def quantize(weight: Tensor, type_name: str) -> Tensor:
    """Pack weights, (..., columns) floating point, into blocks: uint8 (..., row_bytes) on the same device."""
    values = weight.detach().cpu()
    array = values.view(torch.uint16).numpy() if values.dtype == torch.bfloat16 else values.numpy()
    return torch.from_numpy(encode_reference(array, type_name)).to(weight.device)


def parts(linear: LinearPacked, rows: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the codes, uint8 (n, in), scales and minima of some rows of a Linear in tiles."""
    return definitions.parts_of_rows(torch, linear.weight, rows, linear.format)


def quantize_inputs(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes, (M, groups, 32), and scales, (M, groups), of inputs."""
    codes, scales = definitions.round_inputs(x.float().numpy())
    return torch.from_numpy(codes).view(*scales.shape, GROUP), torch.from_numpy(scales)


def product_reference(x: Tensor, linear: LinearPacked) -> Tensor:
    """Multiply (M, in) as the kernels do: (M, out), float32."""
    weights = definitions.unpack_rows(linear.weight.numpy(), np.arange(linear.out_features), linear.format)
    return torch.from_numpy(definitions.product_reference(x.float().numpy(), weights, linear.input_bits))


def pack_ggml(weight: Tensor, type_name: str) -> LinearPacked:
    """Put GGUF's blocks, uint8 (rows, bytes of a row), of a type in `PACKED_FORMATS` into tiles, without loss."""
    format = PACKED_FORMATS[type_name]
    tiles = pack_blocks(weight.numpy(), format.num_columns(weight.shape[1]), format)
    return LinearPacked(torch.from_numpy(tiles), len(weight), format)


def pack_reference(weight: Tensor, type_name: str) -> Tensor:
    """Put GGUF's blocks, uint8 (rows, bytes of a row), into tiles (panels, tiles, tile_bytes)."""
    format = PACKED_FORMATS[type_name]
    blocks = weight.reshape(-1, block_format(type_name).block_bytes)
    if format.is_super:
        return super_tiles(super_blocks(torch, blocks, type_name), len(weight), format)
    num_halves = 1 + format.has_minimum
    groups = blocks.view(len(weight), -1, blocks.shape[1])
    codes, halves = groups[..., 2 * num_halves :], groups[..., : 2 * num_halves].contiguous().view(torch.float16)
    if type_name == "Q8_0":
        codes = codes ^ 128
    elif type_name == "Q5_0":
        codes = joined_codes(
            five_bit_codes(torch, blocks[:, 2:6], blocks[:, 6:]).view(*groups.shape[:2], GROUP), format
        )
    return group_tiles(codes, halves, format)


def packed_codes(codes: Tensor, scale: Tensor, format: PackedFormat, minimum: Tensor | None = None) -> LinearPacked:
    """Pack codes in groups.

    Args:
        codes: uint8, (out, in); below `format.num_levels`.
        scale: float16, (out, in / 32).
        format: What they mean; none of the K types.
        minimum: float16, (out, in / 32), if the format has one.
    """
    num_rows = len(codes)
    assert (minimum is not None) == format.has_minimum and not format.is_super
    groups = joined_codes(codes.view(num_rows, -1, GROUP), format)
    halves = scale.unsqueeze(-1) if minimum is None else torch.stack((scale, minimum), dim=-1)
    return LinearPacked(group_tiles(groups, halves, format), num_rows, format)


def joined_codes(codes: Tensor, format: PackedFormat) -> Tensor:
    """Join the codes of groups, uint8 (..., 32), to the bytes that a row has in a tile: (..., code_bytes / 16)."""
    width = format.code_bytes // 64 - 4  # high bits of a code
    if width == 4:
        return codes
    low = (codes[..., :16] & 15) | (codes[..., 16:] << 4)
    if width == 0:
        return low
    high = (codes >> 4).unflatten(-1, (width, 8 // width, 4))
    joined = high[..., 0, :]
    for i in range(1, 8 // width):
        joined = joined | (high[..., i, :] << (width * i))
    return torch.cat((low, joined.flatten(-2)), dim=-1)


def group_tiles(codes: Tensor, halves: Tensor, format: PackedFormat) -> Tensor:
    """Put groups into tiles, four bytes at a time.

    Args:
        codes: uint8, (rows, groups, code_bytes / 16): a group's bytes, as `joined_codes` makes them.
        halves: float16, (rows, groups, 1 or 2): scales and, if the format has one, minima.
        format: What they mean.
    """
    num_groups, code_bytes = codes.shape[1], format.code_bytes
    panels = -(-len(codes) // TILE_ROWS)
    tiles = torch.empty(panels, num_groups, format.tile_bytes, dtype=torch.uint8, device=codes.device)
    for part, of_tiles in (
        (codes.contiguous().view(torch.int32), tiles.view(torch.int32)[..., : code_bytes // 4]),
        (halves.contiguous().view(torch.int16), tiles.view(torch.int16)[..., code_bytes // 2 :]),
    ):
        rows = _fill(part.flatten(1)).view(panels, TILE_ROWS, num_groups, -1)
        of_tiles.unflatten(-1, (-1, TILE_ROWS)).copy_(rows.permute(0, 2, 3, 1))
    return tiles


def super_tiles(blocks: SuperBlocks, num_rows: int, format: PackedFormat) -> Tensor:
    """Put the super-blocks of `num_rows` rows, row after row, into tiles."""
    codes = _packed_codes(blocks.codes.view(num_rows, -1), format)
    halves = [part.view(num_rows, -1) for part in (blocks.d, blocks.dmin) if part is not None]
    head = [_by_tile(part, 1).view(torch.uint8) for part in halves]
    stored = blocks.scales if format.levels is None else (blocks.scales + 32).view(torch.uint8)
    scales = _by_tile(stored.view(num_rows, -1), blocks.scales.shape[1])
    if format.levels is not None:
        head.append(_signed_six_bits(scales))
    elif blocks.minima is None:
        head.append(scales.view(torch.uint8))
    else:
        head.append(_six_bits(scales, _by_tile(blocks.minima.view(num_rows, -1), 8)))
    return torch.cat((*head, codes.flatten(2).view(*scales.shape[:2], -1)), dim=-1)


def _packed_codes(codes: Tensor, format: PackedFormat) -> Tensor:
    """Lay out codes (rows, in): (panels, groups, code_bytes)."""
    panels = -(-len(codes) // TILE_ROWS)
    lines = _fill(codes).view(panels, TILE_ROWS, -1, GROUP // 4, 4).permute(0, 2, 3, 1, 4)
    return _join_bits(lines, format.code_bytes // 64).reshape(panels, -1, format.code_bytes)


def _by_tile(values: Tensor, num_a_tile: int) -> Tensor:
    """Put a row's values (rows, tiles * num_a_tile) beside those of its panel: (panels, tiles, num_a_tile * 16)."""
    filled = _fill(values)
    panels = len(filled) // TILE_ROWS
    by_tile = filled.view(panels, TILE_ROWS, -1, num_a_tile).permute(0, 2, 3, 1)
    return by_tile.reshape(panels, -1, num_a_tile * TILE_ROWS).contiguous()


def _fill(rows: Tensor) -> Tensor:
    """Add rows of zeros until the last panel is full."""
    missing = -len(rows) % TILE_ROWS
    return rows if not missing else torch.cat((rows, rows.new_zeros(missing, rows.shape[1])))


def _join_bits(lines: Tensor, num_lines: int) -> Tensor:
    """Fold 8 lines of codes (..., 8, 16, 4) with a dimension before them into 8, 4, 5 or 6 lines."""
    if num_lines == 8:
        return lines
    low = (lines[:, :, :4] & 15) | (lines[:, :, 4:] << 4)
    if num_lines == 4:
        return low
    width = num_lines - 4
    high = (lines >> 4).unflatten(2, (width, -1))
    joined = high[:, :, :, 0]
    for i in range(1, 8 // width):
        joined = joined | (high[:, :, :, i] << (width * i))
    return torch.cat((low, joined), dim=2)


def _signed_six_bits(scales: Tensor) -> Tensor:
    """Pack IQ4_XS's scales plus 32, (panels, tiles, 8 * 16): (panels, tiles, 96)."""
    stored = scales.unflatten(-1, (2, 4, TILE_ROWS))
    low = (stored[:, :, 0] & 15) | (stored[:, :, 1] << 4)
    high = stored >> 4
    joined = high[:, :, :, 0] | (high[:, :, :, 1] << 2) | (high[:, :, :, 2] << 4) | (high[:, :, :, 3] << 6)
    return torch.cat((low.flatten(2), joined.flatten(2)), dim=-1)


def _six_bits(scales: Tensor, minima: Tensor) -> Tensor:
    """Pack integers below 64, (panels, tiles, 8 * 16) each: (panels, tiles, 192)."""
    parts = [*scales.chunk(2, dim=-1), *minima.chunk(2, dim=-1)]
    high = (parts[0] >> 4) | (parts[1] >> 4 << 2) | (parts[2] >> 4 << 4) | (parts[3] >> 4 << 6)
    return torch.cat(((parts[0] & 15) | (parts[1] << 4), (parts[2] & 15) | (parts[3] << 4), high), dim=-1)
