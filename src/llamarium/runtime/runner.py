"""The `Runner` protocol: how a model is executed. Torch-free.

A runner's weights are frozen. The runner is chosen once, at loading: the C kernels if they support all of the model's
matrices, else the PyTorch modules.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from llamarium.config import ModelConfig
from llamarium.kernels.input_bits import InputBits
from llamarium.kv_codes import CacheDtype
from llamarium.quant.codes import Codes
from llamarium.runtime.adapter import Adapter
from llamarium.runtime.batch import BLOCK_SIZE, Batch
from llamarium.runtime.taps import Taps

Floats = NDArray[np.float32]

Logits = Any
"""Logits, (W, V) or, for a sampler's rows, (B, V): a float32 numpy array on a CPU, a torch tensor on other devices."""


class Cache(Protocol):
    """A paged KV cache for all layers; `BlockPool` tracks which blocks are in use.

    Attributes:
        num_blocks: Number of blocks.
        block_size: P, slots per block.
        num_bytes: Size in bytes if all blocks are used, scales included.
    """

    num_blocks: int
    block_size: int

    @property
    def num_bytes(self) -> int: ...  # noqa: D102

    def copy_block(self, source: int, target: int) -> None:
        """Copy a block to another one, in all layers."""

    def grow(self, num_blocks: int) -> None:
        """Grow to `num_blocks` blocks, keeping their contents; MemoryBudgetError if there is not enough memory."""

    def read(self, layer_idx: int, blocks: Sequence[int], num_slots: int) -> tuple[Floats, Floats]:
        """Return the keys and values of a sequence's first `num_slots` positions, dequantized: (S, K, H) each."""
        ...


class WeightInfo(Protocol):
    """Metadata of a weight in memory.

    Attributes:
        key: State-dict key, such as `model.layers.0.self_attn.q_proj.weight`.
        type_name: A name from `quant/formats.py`: `F32`, `BF16`, `Q4_1`, `NF4`, ...
        shape: Logical shape: (out, in), or (hidden,) for a norm.
        num_bytes: Size in bytes.
    """

    @property
    def key(self) -> str: ...  # noqa: D102
    @property
    def type_name(self) -> str: ...  # noqa: D102
    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def num_bytes(self) -> int: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class HeldWeight:
    """A `WeightInfo` without the weight itself."""

    key: str
    type_name: str
    shape: tuple[int, ...]
    num_bytes: int


class Runner(Protocol):
    """Executes a model over a KV cache, and describes its weights.

    Attributes:
        config: The model configuration.
        is_row_exact: Whether a token's results have the same bits whatever else is in the batch, however the prompt is
            split into chunks, and on any number of threads. PyTorch rounds products of several tokens differently from
            those of one.
        takes_edits: Whether it supports `Batch.edits`.
        is_native: Whether the C kernels compute everything. Then each product reads its weights exactly as stored, so
            the bytes of a step can be counted.
        input_bits: Bits to which activations are quantized before they are multiplied by packed weights; None without
            quantization.
        adapters: The adapters that `Batch.adapters` indexes; None if the backend does not support several.
        device: Device of the logits: "cpu" or a torch device.
        dtype: Compute dtype between products: "float32", "bfloat16" or "float16".
        kv_dtype: KV cache dtype that "auto" means.
        name: Display name of the backend.
        weights: All weights by key, without a tied head.
        addresses: Addresses of the weights that are read in place.
    """

    is_row_exact: bool
    is_native: bool
    takes_edits: bool

    @property
    def input_bits(self) -> InputBits | None: ...  # noqa: D102
    @property
    def adapters(self) -> tuple[Adapter, ...] | None: ...  # noqa: D102
    @property
    def weights(self) -> Mapping[str, WeightInfo]: ...  # noqa: D102
    @property
    def addresses(self) -> Collection[int]: ...  # noqa: D102
    @property
    def config(self) -> ModelConfig: ...  # noqa: D102
    @property
    def device(self) -> str: ...  # noqa: D102
    @property
    def dtype(self) -> str: ...  # noqa: D102
    @property
    def kv_dtype(self) -> str: ...  # noqa: D102
    @property
    def name(self) -> str: ...  # noqa: D102

    def new_cache(self, num_blocks: int, dtype: CacheDtype = "auto", block_size: int = BLOCK_SIZE) -> Cache:
        """Return an empty KV cache for this runner.

        Args:
            num_blocks: Number of blocks.
            dtype: KV cache dtype.
            block_size: Slots per block, a power of two from 16 to 256. Small blocks waste less memory but make long
                contexts slower (docs/decisions/0014).

        Raises:
            MemoryBudgetError: If there is not enough memory.
        """
        ...

    def run(self, batch: Batch, cache: Cache, taps: Taps | None = None) -> Logits:
        """Run the batch's tokens, write their keys and values to the KV cache, and return the requested logits.

        Raises:
            MemoryBudgetError: If there is not enough memory for activations.
        """
        ...

    def dequantize(self, key: str, rows: Sequence[int] | None = None, *, adapted: bool = False) -> Floats:
        """Return a weight, or some rows of a matrix, as float32. The key of a tied head is accepted.

        Args:
            key: State-dict key.
            rows: Row indices; None for all.
            adapted: Add the correction of the active adapter, which `product` always includes.

        Raises:
            KeyError: If there is no such weight.
            IndexError: If there is no such row.
        """
        ...

    def product(self, key: str, x_MI: Floats) -> Floats:
        """Multiply x by a matrix as in a forward pass, with the active adapter, without bias: (M, in) to (M, out).

        The key of a tied head is accepted.

        Raises:
            KeyError: If there is no such matrix.
        """
        ...

    def codes(self, key: str, rows: Sequence[int]) -> Codes:
        """Return some rows of a quantized matrix as codes and scales.

        Raises:
            KeyError: If there is no such matrix.
            InputError: If it is not quantized, or codes of its format are not supported.
        """
        ...

    def read_stream(self, x_MD: Floats) -> Floats:
        """Apply the final norm and the head to rows of the residual stream: (M, D) to logits (M, V)."""
        ...

    def backend_of(self, key: str) -> str:
        """Return the display name of the backend that multiplies by a matrix."""
        ...

    def with_adapters(self, adapters: Sequence[Adapter], default: int = -1) -> "Runner":
        """Return a runner over the same weights with these adapters instead of its own.

        Args:
            adapters: The adapters, by the indices that `Batch.adapters` uses.
            default: Index of the adapter for batches without `adapters`, -1 for none.

        Raises:
            OptionError: If the backend does not support several adapters (`adapters` is None).
        """
        ...

    def fresh(self) -> "Runner":
        """Return a new runner over the same weights, so that nothing cached for this one is reused."""
        ...
