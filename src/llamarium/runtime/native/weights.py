"""Weights in memory, as numpy arrays in the format in which they are multiplied or stored. Torch-free."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight in memory.

    Attributes:
        key: State-dict key, such as `model.layers.0.self_attn.q_proj.weight`.
        type_name: `F32`, `F16`, `BF16`, or another name from `quant/formats.py` or `quant/stored_types.py`.
        shape: Logical shape: (out, in), or (hidden,) for a norm.
        data: The values, C-contiguous. `F32` is float32, `F16` float16 and `BF16` uint16 bits, all of `shape`. Packed
            types, which the C kernels multiply, are uint8 (panels, tiles, bytes of a tile). A weight that only PyTorch
            modules support is stored in blocks: uint8 (rows, bytes of a row) for GGUF types, codes for a type in
            `STORED_TYPES`.
        state: Additional arrays of a type in `STORED_TYPES`, by name.
    """

    key: str
    type_name: str
    shape: tuple[int, ...]
    data: NDArray[Any]
    state: Mapping[str, NDArray[Any]] = field(default_factory=dict[str, NDArray[Any]])

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return self.data.nbytes + sum(part.nbytes for part in self.state.values())
