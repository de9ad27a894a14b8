"""The one protocol by which a model is executed. Never torch.

A runner's weights are frozen. Which runner it is, is chosen once, when the model is loaded: the C kernels where they
can multiply all of its matrices, the modules elsewhere.
"""

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from llamarium.config import ModelConfig
from llamarium.runtime.batch import BLOCK_SIZE, Batch
from llamarium.runtime.taps import Taps

CacheDtype = Literal["auto", "int8"]
"""What keys and values are kept in: the model's own dtype, or 8 bits with a scale for each (`attention/paged.py`)."""

Logits = Any
"""(W, V) or, of a sampler's rows, (B, V): float32 of numpy on a CPU; a tensor of torch where the model is on another
device."""


DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
"""Of the dtypes that keys and values are kept in."""

SCALE_BYTES = 4
"""Of a key's or value's scale, in a cache of 8 bits."""


class Cache(Protocol):
    """Keys and values of every layer, in blocks; holds no notion of which of them are in use.

    Attributes:
        num_blocks: How many.
        block_size: P, the slots of each.
        num_bytes: What they occupy if all of them are used, scales included.
    """

    num_blocks: int
    block_size: int

    @property
    def num_bytes(self) -> int:
        """What they occupy."""
        ...

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block's content to another, in all layers."""
        ...

    def grow(self, num_blocks: int) -> None:
        """Become larger; what the blocks hold stays.

        Raises:
            MemoryBudgetError: If there is not that much memory.
        """
        ...

    def read(self, layer_idx: int, blocks: Sequence[int], num_slots: int) -> tuple[Any, Any]:
        """Return the keys and values of a sequence's first positions, as queries see them: (S, K, H) each."""
        ...


class Runner(Protocol):
    """Executes a model over kept keys and values.

    Attributes:
        config: The model's shape.
        is_row_exact: Whether a token's results have the bits that they have alone, whatever its company, its chunk and
            the number of threads are. PyTorch's products round otherwise for several tokens than for one.
        device: Where logits are: "cpu", or a device of torch.
        dtype: What it computes in between its products: "float32", "bfloat16" or "float16".
        kv_dtype: What it keeps keys and values in unless told otherwise, of the same.
        name: What computes, for people.
    """

    is_row_exact: bool

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""
        ...

    @property
    def device(self) -> str:
        """Where logits are."""
        ...

    @property
    def dtype(self) -> str:
        """What it computes in."""
        ...

    @property
    def kv_dtype(self) -> str:
        """What it keeps keys and values in."""
        ...

    @property
    def name(self) -> str:
        """What computes."""
        ...

    def new_cache(self, num_blocks: int, dtype: CacheDtype = "auto", block_size: int = BLOCK_SIZE) -> Cache:
        """Return an empty cache for this runner.

        Args:
            num_blocks: How many blocks.
            dtype: What keys and values are kept in.
            block_size: Slots of a block, a power of two from 16 to 256. Small ones waste less memory; a long past is
                read more slowly over them (docs/decisions/0014).

        Raises:
            MemoryBudgetError: If there is not that much memory.
        """
        ...

    def run(self, batch: Batch, cache: Cache, taps: Taps | None = None) -> Logits:
        """Run the batch's tokens, keep their keys and values, return the logits of the tokens that ask for them.

        Raises:
            MemoryBudgetError: If there is no memory for what lies between the layers.
        """
        ...
