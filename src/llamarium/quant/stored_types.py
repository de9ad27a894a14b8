"""Stored types that are more than rows of blocks: how the parts of such a weight become values.

GGUF's types are rows of equal blocks, which `ggml/decode.py` decodes. Other formats store a weight as several tensors
(codes, scales, zero points), each in its own layout. Such a type is one entry of `STORED_TYPES`, and everything that
loads, exports, trains or inspects a model can then use it:

1. The reader of the format makes a `StoredTensor` with the type's name: `data` is the codes, `state` the other tensors
   by name, all of them views of the file. The reader has checked every count, dtype and shape.
2. `StoredType.decode` returns float32 values of some rows. It gets the module of its arrays, numpy or torch, so that
   the base installation reads the type, and a module can keep the weight in blocks on any device.
3. `StoredType.to_blocks` is for weights that a type in `PACKED_FORMATS` represents exactly: it returns GGUF blocks of
   the type that the entry's `packs_as` names, and the C kernels multiply them. Without it, or where `packs_as` is
   None, weights stay as they are stored and are dequantized at each use.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamarium.quant.nf4_state import decode_nf4

Parts = Mapping[str, Any]
"""The arrays or tensors of a weight by name: those of `StoredTensor.state`, and its `data` as "data"."""


@dataclass(frozen=True, slots=True)
class StoredType:
    """A type whose weights are made of several tensors.

    Attributes:
        decode: Called with (xp, parts, shape, start, stop); returns rows `start` to `stop` of a weight of `shape`,
            float32 (stop - start, columns). `xp` is numpy or torch, the module of all parts. The result must not
            depend on which rows are asked for together.
        to_blocks: Called with (parts, shape, start, stop, type_name), parts in numpy; returns the same rows as GGUF
            blocks of a type in `PACKED_FORMATS`, uint8 (stop - start, bytes of a row), with exactly the same values.
    """

    decode: Callable[[Any, Parts, tuple[int, ...], int, int], Any]
    to_blocks: Callable[[Parts, tuple[int, ...], int, int, str], NDArray[np.uint8]] | None = None


STORED_TYPES: dict[str, StoredType] = {"NF4": StoredType(decode_nf4)}
"""By the name that `TensorEntry.dtype` and `StoredTensor.type_name` have."""
