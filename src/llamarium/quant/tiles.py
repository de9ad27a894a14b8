"""Unpacking in PyTorch: the readable counterpart of C's, for other devices.

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


def values_of(codes: Tensor, format: PackedFormat) -> Tensor:
    """Return what codes (uint8) stand for before the scale, float32."""
    if format.levels is None:
        return codes.float() - format.zero
    return torch.tensor(format.levels, dtype=torch.float32, device=codes.device)[codes.long()]


def halves_of(tiles: Tensor, format: PackedFormat) -> Tensor:
    """Show the float16 numbers of tiles (panels, tiles, bytes): (panels, tiles, 1 or 2, 16)."""
    start = 0 if format.is_super else format.code_bytes // 2
    return tiles.view(torch.float16)[..., start : start + format.half_bytes // 2].unflatten(-1, (-1, TILE_ROWS))


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
    """Return the codes in lines of bytes, (n, groups, lines, 4): (n, groups, 8, 4)."""
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
    """Return the scales and minima, (n, tiles, 8), in (n, tiles, 12) bytes."""
    scales, minima, high = packed.split(4, dim=-1)
    parts = [
        (low >> shift & 15) | ((high >> (4 * which + shift // 2) & 3) << 4)
        for which, low in enumerate((scales, minima))
        for shift in (0, 4)
    ]
    return torch.cat(parts[:2], dim=-1), torch.cat(parts[2:], dim=-1)
