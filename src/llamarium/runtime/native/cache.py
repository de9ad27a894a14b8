"""The C kernels' paged KV cache, as numpy arrays. Torch-free.

A layer's keys are (blocks, K, P, H), so that the keys of one head are contiguous within a block, as the kernels read
them.
"""

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamarium.config import ModelConfig
from llamarium.kernels import structs
from llamarium.kernels.memory import no_room, reserve
from llamarium.kv_codes import GROUP, hadamard, is_codes, kinds_of, num_groups, values_of, vector_bytes
from llamarium.runtime.batch import BLOCK_SIZE
from llamarium.runtime.runner import Floats

_STORED = {"float32": np.float32, "bfloat16": np.uint16, "int8": np.int8, "int4": np.uint8}
_SCALES = {"int8": np.float32, "int4": np.uint16}  # numpy has no bfloat16, but its bits

STRIP = 16
"""Slots whose quantized keys are interleaved."""

_SHIFTS = np.array([0, 16, 4, 20, 8, 24, 12, 28], np.uint32)  # bit positions of a word's eight codes, in order

C_DTYPES = {"float32": 0, "bfloat16": 1, "int8": 2, "int4": 4}
"""Numbers of the dtypes in native/llamarium.h."""


class NativeCache:
    """A paged KV cache for all layers.

    Args:
        config: The model configuration.
        num_blocks: Number of blocks.
        dtype: "float32", "bfloat16", or a quantized `CacheDtype`.
        block_size: P, slots per block.

    Raises:
        MemoryBudgetError: If there is not enough memory.

    Attributes:
        k, v: L arrays (num_blocks, K, P, H); bfloat16 is stored as uint16 bits, two 4-bit codes share a byte.
        k_scales, v_scales: If quantized, L arrays (num_blocks, K, P, scales of a vector): float32 for 8 bits, bfloat16
            bits for 4; else empty. `kv_codes.py` defines them, `lm_cache` in native/llamarium.h their layout.
        described: The C struct of this cache.
    """

    def __init__(self, config: ModelConfig, num_blocks: int, dtype: str, block_size: int = BLOCK_SIZE) -> None:
        self.config, self.dtype, self.block_size = config, dtype, block_size
        layers = range(config.num_hidden_layers)
        shape = (num_blocks, config.num_key_value_heads, block_size)
        kinds, groups = kinds_of(dtype), num_groups(config.head_dim)
        widths = [groups * GROUP // 2 if kind == "int4" else config.head_dim for kind in kinds]
        scaled = layers if is_codes(kinds[0]) else ()
        try:
            self.k, self.v = (
                [reserve((*shape, width), _STORED[kind]) for _ in layers]
                for kind, width in zip(kinds, widths, strict=True)
            )
            self.k_scales, self.v_scales = (
                [reserve((*shape, groups if kind == "int4" else 1), _SCALES[kind]) for _ in scaled] for kind in kinds
            )
        except MemoryError:
            pair = sum(vector_bytes(kind, config.head_dim) for kind in kinds)
            raise no_room(num_blocks * block_size, len(layers) * math.prod(shape) * pair) from None
        self.num_blocks = num_blocks
        self._arrays: list[NDArray[np.generic]] = [*self.k, *self.v, *self.k_scales, *self.v_scales]
        self.described = structs.CCache(
            *(C_DTYPES[kind] for kind in kinds), num_blocks, block_size,
            *map(_pointers, (self.k, self.v, self.k_scales, self.v_scales)),
        )  # fmt: skip

    @property
    def num_bytes(self) -> int:
        """Size in bytes once all blocks are used, scales included."""
        return sum(array.nbytes for array in self._arrays)

    def parts(self, block: int) -> list[memoryview]:
        """Return the memory of a block, in all layers."""
        return [array[block].data for array in self._arrays]

    def copy_block(self, source: int, target: int) -> None:
        """Copy a block to another one, in all layers."""
        for array in self._arrays:
            array[target] = array[source]

    def grow(self, num_blocks: int) -> None:
        """Grow to `num_blocks` blocks, keeping their contents; a failure or an interrupt leaves the cache unchanged.

        Raises:
            MemoryBudgetError: If there is not enough memory.
        """
        larger = NativeCache(self.config, num_blocks, self.dtype, self.block_size)
        for new, current in zip(larger._arrays, self._arrays, strict=True):
            new[: len(current)] = current
        vars(self).update(vars(larger))

    def read(self, layer_idx: int, blocks: Sequence[int], num_slots: int) -> tuple[Floats, Floats]:
        """Return the keys and values of a sequence's first positions, dequantized: (S, K, H) each."""
        used_blocks = list(blocks[: -(-num_slots // self.block_size)])
        k_BKPH, v_BKPH = (self._numbers(part, layer_idx, used_blocks) for part in "kv")
        k_SKH, v_SKH = (part.swapaxes(1, 2).reshape(-1, *part.shape[1::2])[:num_slots] for part in (k_BKPH, v_BKPH))
        return k_SKH, v_SKH

    def _numbers(self, part: str, layer_idx: int, blocks: list[int]) -> Floats:
        """Return the keys ("k") or values ("v") of some blocks: (B, K, P, H)."""
        stored, scales = vars(self)[part][layer_idx][blocks], vars(self)[f"{part}_scales"]
        if not scales:
            return _floats(stored)
        head_dim = self.config.head_dim
        if not blocks:
            return np.zeros((0, *stored.shape[1:3], head_dim), np.float32)
        stored = _codes_of_values(stored) if part == "v" else _codes_of_keys(stored)
        return hadamard(np, values_of(np, stored, _floats(_scales_by_slot(scales[layer_idx][blocks])), head_dim))


def _codes_of_keys(strips_BKPX: NDArray[Any]) -> NDArray[Any]:
    """Return each slot's codes by themselves, as `kv_codes.py` has them; `lm_cache` in the header says how they lie."""
    shape, word = strips_BKPX.shape, np.uint16 if strips_BKPX.dtype == np.int8 else np.uint32
    words = strips_BKPX.reshape(*shape[:2], -1, STRIP * shape[3]).view(word)
    words = words.reshape(*words.shape[:3], -1, STRIP).swapaxes(3, 4)  # strip, slot, word
    if word is np.uint16:
        return np.ascontiguousarray(words).view(np.int8).reshape(shape)
    codes = (words[..., None] >> _SHIFTS & 15).astype(np.uint8).reshape(*shape[:3], -1, GROUP)
    return (codes[..., : GROUP // 2] | codes[..., GROUP // 2 :] << 4).reshape(shape)


def _scales_by_slot(strips_BKPG: NDArray[Any]) -> NDArray[Any]:
    """Return each slot's scales by themselves."""
    shape = strips_BKPG.shape
    return strips_BKPG.reshape(*shape[:2], -1, shape[3], STRIP).swapaxes(3, 4).reshape(shape)


def _codes_of_values(pairs_BKPX: NDArray[Any]) -> NDArray[Any]:
    """As `_codes_of_keys`, of values."""
    shape = pairs_BKPX.shape
    if pairs_BKPX.dtype == np.int8:
        return pairs_BKPX.reshape(*shape[:2], -1, shape[3], 2).swapaxes(3, 4).reshape(shape)
    words = pairs_BKPX.reshape(*shape[:2], -1, 2 * shape[3]).view(np.uint16)
    words = words.reshape(*words.shape[:3], -1, GROUP // 4, 2).transpose(0, 1, 2, 5, 3, 4)  # slot, group, word
    low, high = ((words >> shift & 15 | (words >> shift + 8 & 15) << 4).astype(np.uint8) for shift in (0, 4))
    return np.concatenate((low, high), -1).reshape(shape)


def _floats(stored: NDArray[np.generic]) -> Floats:
    if stored.dtype == np.uint16:
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)


def _pointers(arrays: Sequence[NDArray[np.generic]]) -> "ctypes.Array[ctypes.c_void_p]":
    return (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))
