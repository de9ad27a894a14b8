"""The one protocol by which a model is executed. Never torch.

A runner's weights are frozen. Which runner it is, is chosen once, when the model is loaded: the C kernels where they
can multiply all of its matrices, the modules elsewhere.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from llamarium.config import ModelConfig
from llamarium.kernels.native import InputBits
from llamarium.kv_codes import CacheDtype
from llamarium.quant.codes import Codes
from llamarium.runtime.adapter import Adapter
from llamarium.runtime.batch import BLOCK_SIZE, Batch
from llamarium.runtime.taps import Taps

Floats = NDArray[np.float32]

Logits = Any
"""(W, V) or, of a sampler's rows, (B, V): float32 of numpy on a CPU; a tensor of torch where the model is on another
device."""


class Cache(Protocol):
    """Keys and values of every layer, in blocks of `block_size` slots (P); which of them are in use is not known here.

    `num_bytes` is what they occupy if all of them are used, scales included.
    """

    num_blocks: int
    block_size: int

    @property
    def num_bytes(self) -> int: ...  # noqa: D102

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block's content to another, in all layers."""

    def grow(self, num_blocks: int) -> None:
        """Become larger; what the blocks hold stays; MemoryBudgetError if there is not that much memory."""

    def read(self, layer_idx: int, blocks: Sequence[int], num_slots: int) -> tuple[Floats, Floats]:
        """Return the keys and values of a sequence's first positions, as queries see them: (S, K, H) each."""
        ...


class WeightInfo(Protocol):
    """What is known of a weight in memory.

    Attributes:
        key: The state-dict key, such as `model.layers.0.self_attn.q_proj.weight`.
        type_name: Of `quant/formats.py`: `F32`, `BF16`, `Q4_1`, `NF4`, ...
        shape: The logical shape: (out, in), or a norm's (hidden,).
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
    """A `WeightInfo` of a weight that is kept elsewhere."""

    key: str
    type_name: str
    shape: tuple[int, ...]
    num_bytes: int


class Runner(Protocol):
    """Executes a model over kept keys and values, and describes its weights.

    Attributes:
        config: The model's shape.
        is_row_exact: Whether a token's results have the bits that they have alone, in any company, chunk and number of
            threads. PyTorch's products round otherwise for several tokens than for one.
        takes_edits: Whether a batch may name edits (`Batch.edits`).
        reads_in_place: Whether the C kernels compute everything. Each product reads its weights as they are kept, so
            that a step's bytes can be counted.
        input_bits: What inputs of packed weights are rounded to; None where nothing is rounded.
        adapters: Those that a batch may name by their place (`Batch.adapters`); None where it may name none.
        device: Where logits are: "cpu", or a device of torch.
        dtype: The dtype between products: "float32", "bfloat16" or "float16".
        kv_dtype: The dtype of keys and values in a cache of dtype "auto".
        name: Display name of the backend.
        weights: All weights by key; a tied head is not among them.
        addresses: Of the weights that are read in place; empty where there are none.
    """

    is_row_exact: bool
    reads_in_place: bool
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
        """Return an empty cache for this runner; MemoryBudgetError if there is not that much memory.

        `block_size` is a power of two from 16 to 256. Small blocks waste less memory; a long past is read more slowly
        over them (docs/decisions/0014).
        """
        ...

    def run(self, batch: Batch, cache: Cache, taps: Taps | None = None) -> Logits:
        """Run the batch's tokens, keep their keys and values, return the logits of the tokens that ask for them.

        MemoryBudgetError if there is no memory for what lies between the layers.
        """
        ...

    def dequantize(self, key: str, rows: Sequence[int] | None = None, *, adapted: bool = False) -> Floats:
        """Return a weight, or some rows of a matrix, as float32; a tied head's key is taken too.

        `adapted` adds the correction of the adapter that is on; `product` always has it. KeyError if there is no such
        weight, IndexError if there is no such row.
        """
        ...

    def product(self, key: str, x_MI: Floats) -> Floats:
        """Multiply by a matrix as a pass does, the adapter that is on included, without its bias: (M, in) to (M, out).

        A tied head's key is taken too. KeyError if there is no such matrix.
        """
        ...

    def codes(self, key: str, rows: Sequence[int]) -> Codes:
        """Return some rows of a quantized matrix as codes and scales.

        KeyError if there is no such matrix; InputError if it is not quantized, or its codes are not known.
        """
        ...

    def read_stream(self, x_MD: Floats) -> Floats:
        """Return what the final norm and the head make of rows of the residual stream: (M, D) to logits (M, V)."""
        ...

    def backend_of(self, key: str) -> str:
        """Return the display name of what multiplies by a matrix."""
        ...

    def with_adapters(self, adapters: Sequence[Adapter], default: int = -1) -> "Runner":
        """Return a runner over the same weights with these adapters, low-rank corrections, and no others.

        `Batch.adapters` has their places here; `default` is used where a batch names none, -1 for none. OptionError
        where the backend takes none (`adapters` is None).
        """
        ...

    def fresh(self) -> "Runner":
        """Return another runner over the same weights: what was cached with this one is not used with that one."""
        ...
