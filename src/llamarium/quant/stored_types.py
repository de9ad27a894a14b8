"""The registry of stored types that consist of several tensors.

GGUF types are rows of equal blocks, which `ggml/decode.py` decodes. Other formats store a weight as several tensors
(codes, scales, zero points), each format in its own layout. Such a type is an entry of `STORED_TYPES`; everything that
loads, exports, trains or inspects a model can then use it:

1. The reader of the format returns a `StoredTensor` with the type's name: `data` is the codes, `state` has the other
   tensors by name, all of them views of the file. The reader has checked all sizes, dtypes and shapes.
2. `StoredType.decode` dequantizes a range of rows to float32. It receives the module of its arrays, numpy or torch, so
   that the type can be read without PyTorch, and a PyTorch module can keep the weight quantized on any device.
3. `StoredType.exact_type` returns the type in `PACKED_FORMATS` that represents a weight exactly, if there is one, and
   `StoredType.to_blocks` converts the weight to GGUF blocks of it, which the C kernels multiply. Other weights are
   dequantized once if there is enough memory, or else at each use.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamarium.quant.float8 import decode_float8
from llamarium.quant.grouped import (
    Unpack,
    decode_groups,
    exact_type,
    group_blocks,
    unpack_along,
    unpack_awq,
    unpack_down,
)
from llamarium.quant.nf4_state import decode_nf4

Parts = Mapping[str, Any]
"""The arrays or tensors of a weight, by name: those of `StoredTensor.state`, and its `data` as "data"."""


@dataclass(frozen=True, slots=True)
class StoredType:
    """A type whose weights consist of several tensors.

    Attributes:
        decode: Called with (xp, parts, shape, start, stop); returns rows `start` to `stop` of a weight of `shape`,
            float32 (stop - start, columns). `xp` is numpy or torch, the module of all parts. The values of a row must
            not depend on the range.
        exact_type: Called with (parts, shape), parts in numpy; returns the type in `PACKED_FORMATS` with exactly the
            same values, or None. It may read all scales of the weight.
        to_blocks: Called with (parts, shape, start, stop, type_name), parts in numpy; returns the same rows as GGUF
            blocks of the type that `exact_type` returned, uint8 (stop - start, bytes per row).
        is_kept: True if modules always keep the weight quantized instead of dequantizing it at loading, because
            training with adapters (QLoRA) needs it.
    """

    decode: Callable[[Any, Parts, tuple[int, ...], int, int], Any]
    exact_type: Callable[[Parts, tuple[int, ...]], str | None] = lambda parts, shape: None
    to_blocks: Callable[[Parts, tuple[int, ...], int, int, str], NDArray[np.uint8]] | None = None
    is_kept: bool = False


def _integers(unpack: Unpack, num_bits: int) -> StoredType:
    """Return the stored type of group-quantized integers of `num_bits` that `unpack` unpacks."""
    return StoredType(
        partial(decode_groups, unpack), partial(exact_type, unpack, num_bits), partial(group_blocks, unpack)
    )


STORED_TYPES: dict[str, StoredType] = {
    "NF4": StoredType(decode_nf4, is_kept=True),
    "FP8": StoredType(decode_float8),
    "AWQ4": _integers(unpack_awq, 4),
    "AWQ4_GEMV": _integers(unpack_along(4), 4),
    **{f"GPTQ{bits}": _integers(unpack_down(bits), bits) for bits in (2, 3, 4, 8)},
    **{f"INT{bits}": _integers(unpack_along(bits), bits) for bits in range(2, 9)},
}
"""Stored types by name, as in `TensorEntry.dtype` and `StoredTensor.type_name`. `INT2` to `INT8` are packed integers of
compressed-tensors."""
