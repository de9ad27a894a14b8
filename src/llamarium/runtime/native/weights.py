"""A model's weights as the native runner takes them: numpy arrays, in the form in which the C kernels multiply them."""

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight in memory.

    Attributes:
        key: The state-dict key, such as `model.layers.0.self_attn.q_proj.weight`.
        type_name: Its format's name: `F32`, `F16`, `BF16`, or a packed one of `quant/formats.py`.
        shape: The logical shape: (out, in), or a norm's (hidden,).
        data: C-contiguous. `F32` is float32, `F16` float16 and `BF16` its bits as uint16, all of `shape`; the packed
            formats are uint8 (panels, tiles, bytes of a tile).
    """

    key: str
    type_name: str
    shape: tuple[int, ...]
    data: NDArray[Any]

    @property
    def num_bytes(self) -> int:
        """What it occupies."""
        return self.data.nbytes
