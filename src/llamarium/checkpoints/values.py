"""Dequantization of stored weights, for all types. Torch-free.

A reader returns bytes and the name of their type (`StoredTensor`). `values` decodes a range of rows of any type, so
that a large matrix is never in memory in float32 as a whole. Types other than GGUF's are registered in
`quant/stored_types.py`.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamarium.checkpoints.checkpoint import Checkpoint, StoredTensor
from llamarium.checkpoints.storage import FLOATS
from llamarium.kernels import native
from llamarium.quant.codes import unpack_rows
from llamarium.quant.formats import PACKED_FORMATS, TILE_ROWS
from llamarium.quant.packing import dequantize, matrix_of
from llamarium.quant.stored_types import STORED_TYPES, Parts

Floats = NDArray[np.float32]

_PIECE_WEIGHTS = 2**20


def values(stored: StoredTensor, rows: slice = slice(None), out: Floats | None = None) -> Floats:
    """Decode a range of rows of a stored weight to float32, (rows, columns).

    A vector is one row. The values of a row do not depend on the range.

    Args:
        stored: The weight.
        rows: A slice without a step.
        out: Contiguous array of the result's shape; overwritten and returned. GGUF types are decoded into it directly.
    """
    num_rows, columns = stored.shape if len(stored.shape) == 2 else (1, *stored.shape)
    start, stop, _ = rows.indices(num_rows)
    numbers = np.arange(start, stop)
    if stored.type_name in STORED_TYPES:
        with np.errstate(all="ignore"):  # infinite and NaN scales are reported by the loader
            decoded = STORED_TYPES[stored.type_name].decode(np, parts_of(stored), stored.shape, start, stop)
    elif not stored.is_packed:
        return dequantize(stored.type_name, (stop - start, columns), stored.data[start:stop], out)
    elif native.library() is None:
        decoded = unpack_rows(stored.data, numbers, PACKED_FORMATS[stored.type_name]).values_RC
    else:
        data = np.ascontiguousarray(stored.data)
        return native.lookup(matrix_of(stored.type_name, stored.shape, data.ctypes.data), numbers, out)
    if out is None:
        return decoded
    out[...] = decoded
    return out


def parts_of(stored: StoredTensor) -> Parts:
    """Return the arrays that a type in `STORED_TYPES` is decoded from, by name."""
    return {"data": stored.data, **stored.state}


def pieces(shape: tuple[int, ...]) -> Iterator[slice]:
    """Yield ranges of rows that cover a weight: whole panels of tiles, each of about a million weights."""
    num_rows, columns = shape if len(shape) == 2 else (1, *shape)
    step = max(1, _PIECE_WEIGHTS // (columns * TILE_ROWS)) * TILE_ROWS
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def as_floats(stored: StoredTensor) -> NDArray[Any]:
    """Return a floating-point weight as an array of its shape, over the same memory."""
    return stored.data.view(FLOATS[stored.type_name]).reshape(stored.shape)


def read_array(checkpoint: Checkpoint, key: str) -> NDArray[Any]:
    """Return a weight's values, (out, in): floats in their stored dtype, bfloat16 as uint16 bits, others as float32."""
    entry = checkpoint.entries[key]
    stored = checkpoint.stored(key, copy=not (entry.dtype in FLOATS or entry.is_packed))
    if stored.type_name in FLOATS:
        return as_floats(stored)
    out = np.empty(stored.shape, np.float32)
    for rows in pieces(stored.shape):
        values(stored, rows, np.atleast_2d(out)[rows])
    return out
