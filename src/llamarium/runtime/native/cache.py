"""Keys and values for the C kernels: numpy arrays, paged. Never torch.

A layer's keys are (blocks, K, P, H): those of one head lie together within a block, as the kernels read them.
"""

import ctypes
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from llamarium.config import ModelConfig
from llamarium.kernels import native
from llamarium.kernels.memory import no_room, reserve
from llamarium.runtime.batch import BLOCK_SIZE
from llamarium.runtime.runner import DTYPE_BYTES, SCALE_BYTES, Floats

_STORED = {"float32": np.float32, "bfloat16": np.uint16, "int8": np.int8}  # numpy has no bfloat16, but its bits

C_DTYPES = {"float32": 0, "bfloat16": 1, "int8": 2}
"""The header's numbers for what keys, values and norms are kept in."""


class NativeCache:
    """Keys and values of every layer.

    Args:
        dtype: "float32", "bfloat16" or "int8".
        block_size: P, slots of a block.

    Raises:
        MemoryBudgetError: If there is no room for it.

    Attributes:
        k: L arrays of (num_blocks, K, P, H), as `v` is; bfloat16 as its bits, uint16.
        k_scales: With int8, L arrays of (num_blocks, K, P), float32, as `v_scales`: keys are k * k_scales; else none.
        described: ctypes view of this cache.
    """

    def __init__(self, config: ModelConfig, num_blocks: int, dtype: str, block_size: int = BLOCK_SIZE) -> None:
        self.config, self.dtype, self.block_size = config, dtype, block_size
        layers = range(config.num_hidden_layers)
        shape = (num_blocks, config.num_key_value_heads, block_size)
        scaled = layers if dtype == "int8" else ()
        try:
            self.k, self.v = ([reserve((*shape, config.head_dim), _STORED[dtype]) for _ in layers] for _ in "kv")
            self.k_scales, self.v_scales = ([reserve(shape, np.float32) for _ in scaled] for _ in "kv")
        except MemoryError:
            vector = config.head_dim * DTYPE_BYTES[dtype] + (SCALE_BYTES if dtype == "int8" else 0)
            raise no_room(num_blocks * block_size, 2 * len(layers) * math.prod(shape) * vector) from None
        self.num_blocks = num_blocks
        self.described = native.CCache(
            C_DTYPES[dtype], num_blocks, block_size,
            *map(_pointers, (self.k, self.v, self.k_scales, self.v_scales)),
        )  # fmt: skip

    @property
    def num_bytes(self) -> int:
        """What keys and values together occupy once all blocks are used, scales included."""
        return sum(array.nbytes for array in self._arrays())

    def _arrays(self) -> list[NDArray[np.generic]]:
        return [*self.k, *self.v, *self.k_scales, *self.v_scales]

    def parts(self, block: int) -> list[memoryview]:
        """Return one block's content, in all layers: the cache's own memory."""
        return [array[block].data for array in self._arrays()]

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block's content to another, in all layers."""
        for array in self._arrays():
            array[target] = array[source]

    def grow(self, num_blocks: int) -> None:
        """Become larger; what the blocks hold stays. Where that fails or is interrupted, the cache is as it was.

        MemoryBudgetError if there is no room for it.
        """
        larger = NativeCache(self.config, num_blocks, self.dtype, self.block_size)
        for new, kept in zip(larger._arrays(), self._arrays(), strict=True):
            new[: len(kept)] = kept
        vars(self).update(vars(larger))

    def read(self, layer_idx: int, blocks: Sequence[int], num_slots: int) -> tuple[Floats, Floats]:
        """Return the keys and values of a sequence's first positions, as queries see them: (S, K, H) each."""
        used = list(blocks[: -(-num_slots // self.block_size)])
        k_BKPH, v_BKPH = _floats(self.k[layer_idx][used]), _floats(self.v[layer_idx][used])
        if self.k_scales:
            k_BKPH = k_BKPH * self.k_scales[layer_idx][used][..., None]
            v_BKPH = v_BKPH * self.v_scales[layer_idx][used][..., None]
        k_SKH, v_SKH = (part.swapaxes(1, 2).reshape(-1, *part.shape[1::2])[:num_slots] for part in (k_BKPH, v_BKPH))
        return k_SKH, v_SKH


def _floats(stored: NDArray[np.generic]) -> Floats:
    if stored.dtype == np.uint16:
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)


def _pointers(arrays: Sequence[NDArray[np.generic]]) -> "ctypes.Array[ctypes.c_void_p]":
    return (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))
