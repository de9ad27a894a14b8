"""Packing and unpacking in PyTorch: the readable counterpart of `native/pack.c`, for other devices and for tests.

In a file the codes of a row lie together. A processor multiplies 16 rows at once, and memory is read fastest in one
straight line; so packed weights are cut into tiles of 16 rows, and tiles follow each other in the order in which they
are multiplied:

    weight (panels of 16 rows, tiles of 32 or 256 columns, bytes of a tile)

`native/tiles.h` is the layout of a tile. Its sizes and offsets are in `quant/formats.py` too, and a test holds them to
C's.
"""

import torch
from torch import Tensor

from llamarium.quant.formats import GROUP, TILE_ROWS, PackedFormat
from llamarium.quant.ggml.decode import SuperBlocks


def values_of(codes: Tensor, format: PackedFormat) -> Tensor:
    """Return what codes (uint8) stand for before the scale, float32."""
    if format.levels is None:
        return codes.float() - format.zero
    return torch.tensor(format.levels, dtype=torch.float32, device=codes.device)[codes.long()]


def halves_of(tiles: Tensor, format: PackedFormat) -> Tensor:
    """Show the float16 numbers of tiles (panels, tiles, bytes): (panels, tiles, 1 or 2, 16)."""
    start = 0 if format.is_super else format.code_bytes // 2
    return tiles.view(torch.float16)[..., start : start + format.half_bytes // 2].unflatten(-1, (-1, TILE_ROWS))


# --- packing ----------------------------------------------------------------------------------------------------------


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
    scales = _by_tile(blocks.scales.view(num_rows, -1), blocks.scales.shape[1])
    if blocks.minima is None:
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


def _six_bits(scales: Tensor, minima: Tensor) -> Tensor:
    """Pack integers below 64, (panels, tiles, 8 * 16) each: (panels, tiles, 192)."""
    parts = [*scales.chunk(2, dim=-1), *minima.chunk(2, dim=-1)]
    high = (parts[0] >> 4) | (parts[1] >> 4 << 2) | (parts[2] >> 4 << 4) | (parts[3] >> 4 << 6)
    return torch.cat(((parts[0] & 15) | (parts[1] << 4), (parts[2] & 15) | (parts[3] << 4), high), dim=-1)


# --- unpacking --------------------------------------------------------------------------------------------------------


def unpack_rows(tiles: Tensor, rows: Tensor, format: PackedFormat) -> tuple[Tensor, Tensor, Tensor | None]:
    """Take some rows, by their numbers (n,), out of tiles.

    Returns:
        Codes uint8 (n, in); scales float32 (n, scales of a row); and minima alike, or None. Each scale is for an equal
        part of the row, and each is exact: one of a K type is the product of its two factors.
    """
    panel, row = rows // TILE_ROWS, rows % TILE_ROWS
    coded = tiles[..., format.head_bytes : format.head_bytes + format.columns // GROUP * format.code_bytes]
    lines = coded.unflatten(-1, (-1, format.code_bytes // 64, TILE_ROWS, 4))[panel, :, :, :, row]
    codes = _split_bits(lines.flatten(1, 2)).flatten(1)
    halves = halves_of(tiles, format)[panel, :, :, row].float()
    scale, minimum = halves[..., 0], halves[..., 1] if format.has_minimum else None
    if not format.is_super:
        return codes, scale, minimum
    integers = tiles[..., format.half_bytes : format.head_bytes].unflatten(-1, (-1, TILE_ROWS))[panel, :, :, row]
    if minimum is None:
        return codes, _times(scale, integers.view(torch.int8)), None
    small, low = _split_six_bits(integers)
    return codes, _times(scale, small), -_times(minimum, low)


def _times(halves: Tensor, integers: Tensor) -> Tensor:
    """Multiply (n, tiles) with (n, tiles, parts): (n, tiles * parts)."""
    return (halves.unsqueeze(-1) * integers.float()).flatten(1)


def _split_bits(lines: Tensor) -> Tensor:
    """Undo `_join_bits` for lines (n, groups, lines, 4): (n, groups, 8, 4)."""
    width = lines.shape[2] - 4
    if width == 4:
        return lines
    low = lines[:, :, :4]
    codes = torch.cat((low & 15, low >> 4), dim=2)
    if width == 0:
        return codes
    high = [(lines[:, :, 4:] >> (width * i)) & (2**width - 1) for i in range(8 // width)]
    return codes | (torch.stack(high, dim=3).flatten(2, 3) << 4)


def _split_six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Undo `_six_bits` for (n, tiles, 12): scales and minima (n, tiles, 8)."""
    scales, minima, high = packed.split(4, dim=-1)
    parts = [
        (low >> shift & 15) | ((high >> (4 * which + shift // 2) & 3) << 4)
        for which, low in enumerate((scales, minima))
        for shift in (0, 4)
    ]
    return torch.cat(parts[:2], dim=-1), torch.cat(parts[2:], dim=-1)
