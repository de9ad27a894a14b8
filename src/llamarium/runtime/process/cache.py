"""A KV cache in memory that two processes share: float32, in an unnamed file that both map. Torch-free."""

import mmap
import os
import tempfile
import weakref
from collections.abc import Sequence

import numpy as np

from llamarium.config import ModelConfig
from llamarium.kernels.memory import no_room
from llamarium.runtime.batch import BLOCK_SIZE
from llamarium.runtime.runner import Floats


class SharedCache:
    """A paged KV cache for all layers, shared with another process.

    This process owns it, so it survives the other one. Memory is allocated page by page as it is written.

    Args:
        config: The model configuration.
        num_blocks: Number of blocks.
        block_size: P, slots per block.

    Raises:
        MemoryBudgetError: If there is not enough memory.

    Attributes:
        descriptor: The open file.
        blocks: float32 (num_blocks, L, 2, P, K, H): keys at 0, values at 1.
    """

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int = BLOCK_SIZE) -> None:
        self.config, self.block_size = config, block_size
        self.descriptor = unnamed_file()
        weakref.finalize(self, os.close, self.descriptor)
        self.grow(num_blocks)

    @property
    def num_bytes(self) -> int:
        """Size in bytes once all blocks are used."""
        return self.blocks.nbytes

    def copy_block(self, source: int, target: int) -> None:
        """Copy a block to another one, in all layers."""
        self.blocks[target] = self.blocks[source]

    def grow(self, num_blocks: int) -> None:
        """Grow to `num_blocks` blocks, keeping their contents; MemoryBudgetError if there is not enough memory."""
        num_bytes = num_blocks * block_bytes(self.config, self.block_size)
        try:
            os.ftruncate(self.descriptor, num_bytes)
            self.blocks = mapped(self.descriptor, self.config, self.block_size)
        except (OSError, OverflowError, ValueError):
            raise no_room(num_blocks * self.block_size, num_bytes) from None
        self.num_blocks = num_blocks

    def read(self, layer_idx: int, blocks: Sequence[int], num_slots: int) -> tuple[Floats, Floats]:
        """Return the keys and values of a sequence's first positions: (S, K, H) each."""
        return read_past(self.blocks, layer_idx, blocks, num_slots)


def mapped(descriptor: int, config: ModelConfig, block_size: int) -> Floats:
    """Map a cache's file and return all blocks, (num_blocks, L, 2, P, K, H)."""
    shape = (config.num_hidden_layers, 2, block_size, config.num_key_value_heads, config.head_dim)
    memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    return np.frombuffer(memory, np.float32).reshape(-1, *shape)


def read_past(cache: Floats, layer_idx: int, blocks: Sequence[int], num_slots: int) -> tuple[Floats, Floats]:
    """Return a copy of the keys and values of a sequence's first positions: (S, K, H) each."""
    used_blocks = list(blocks[: -(-num_slots // cache.shape[3])])
    k_SKH, v_SKH = (cache[used_blocks, layer_idx, part].reshape(-1, *cache.shape[4:])[:num_slots] for part in (0, 1))
    return k_SKH, v_SKH


def block_bytes(config: ModelConfig, block_size: int) -> int:
    """Return the size of a block in bytes, in all layers."""
    return config.num_hidden_layers * 2 * block_size * config.num_key_value_heads * config.head_dim * 4


def unnamed_file() -> int:
    """Return the descriptor of an unnamed file: in memory on Linux, in the temporary directory elsewhere."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("llamarium-cache")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
