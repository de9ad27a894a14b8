"""A weight in memory: numpy arrays, in the form in which it is multiplied, or stored until a module dequantizes it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight in memory.

    Attributes:
        key: The state-dict key, such as `model.layers.0.self_attn.q_proj.weight`.
        type_name: Its format's name: `F32`, `F16`, `BF16`, or another one of `quant/formats.py` or
            `quant/stored_types.py`.
        shape: The logical shape: (out, in), or a norm's (hidden,).
        data: C-contiguous. `F32` is float32, `F16` float16 and `BF16` its bits as uint16, all of `shape`. Types that
            the C kernels multiply are uint8 (panels, tiles, bytes of a tile). A weight that only modules take is in
            blocks: uint8 (rows, bytes of a row) for GGUF's types, codes for a type in `STORED_TYPES`.
        state: The other arrays of a type in `STORED_TYPES`, by name.
    """

    key: str
    type_name: str
    shape: tuple[int, ...]
    data: NDArray[Any]
    state: Mapping[str, NDArray[Any]] = field(default_factory=dict[str, NDArray[Any]])

    @property
    def num_bytes(self) -> int:
        """What it occupies."""
        return self.data.nbytes + sum(part.nbytes for part in self.state.values())
