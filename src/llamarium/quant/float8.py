"""Weights in 8-bit floating point (FP8), with one scale per tensor, per row or per block.

A byte has a sign, four bits of exponent and three of mantissa (`F8_E4M3` in safetensors, `float8_e4m3fn` in PyTorch):
no infinities, one NaN of each sign, a maximum of 448. A weight is this number times its scale.

Source: Micikevicius et al., "FP8 Formats for Deep Learning" (2022), table 1.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Parts = Mapping[str, Any]
"""The arrays of a weight: `data`, uint8 (out, in); `scales`, float32 (row blocks, column blocks); `block`, int64 (2,),
the rows and columns of a block. The last blocks may be short."""


def _levels() -> NDArray[np.float32]:
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, (code & 7) / 8
    sizes = np.where(exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * 2.0 ** (exponent - 7))
    sizes[(code & 127) == 127] = np.nan
    return np.where(code < 128, sizes, -sizes).astype(np.float32)


E4M3 = _levels()
"""Values of the 256 codes, float32 (256,)."""


def decode_float8(xp: Any, parts: Parts, shape: tuple[int, ...], start: int, stop: int) -> Any:
    """Dequantize rows `start` to `stop` of a weight, float32 (stop - start, in).

    Args:
        xp: The module of the arrays, `numpy` or `torch`.
        parts: See `Parts`.
        shape: (out, in).
        start: First row.
        stop: One past the last row.
    """
    data, scales = parts["data"], parts["scales"]
    num_rows, num_columns = (int(size) for size in parts["block"])
    levels = xp.asarray(E4M3)
    if xp is not np:
        levels = levels.to(data.device)
    values = xp.take(levels, xp.asarray(data[start:stop], dtype=xp.int64))

    rows = scales[start // num_rows : -(-stop // num_rows)]
    if len(rows) > 1:
        skipped = start % num_rows
        rows = _repeated(xp, rows, num_rows, 0)[skipped : skipped + stop - start]
    if rows.shape[1] > 1:
        rows = _repeated(xp, rows, num_columns, 1)[:, : shape[1]]
    return values * rows


def _repeated(xp: Any, scales: Any, count: int, axis: int) -> Any:
    return scales.repeat(count, axis) if xp is np else scales.repeat_interleave(count, axis)
