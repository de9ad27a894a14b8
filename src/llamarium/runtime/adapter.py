"""Low-rank adapters in the form that runners use. Torch-free.

    y = gain * (W x + scale * b (a x))

Only DoRA has a gain: the learned norm of each row divided by the norm of the corrected row.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

LAYER_LINEARS = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip
"""Module paths of a layer's seven Linears, by the short names that the C kernels use."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """The low-rank correction of one Linear; arrays are C-contiguous.

    Attributes:
        scale: Factor of b (a x).
        a: float32 (rank, in).
        b: float32 (out, rank).
        gain: DoRA's gain, float32 (out,), or None.
    """

    scale: float
    a: NDArray[np.float32]
    b: NDArray[np.float32]
    gain: NDArray[np.float32] | None = None

    def arrays(self) -> list[NDArray[np.float32]]:
        """Return its arrays."""
        return [self.a, self.b] if self.gain is None else [self.a, self.b, self.gain]

    def added_to(
        self, base_OX: NDArray[np.float32], low_OX: NDArray[Any], rows: NDArray[np.int64] | slice = slice(None)
    ) -> NDArray[np.float32]:
        """Apply scale and gain: correct rows of W by those of b a, or rows of W x by those of b a x."""
        out_OX = base_OX + np.multiply(low_OX, self.scale, dtype=np.float32)
        return out_OX if self.gain is None else out_OX * self.gain[rows, None]


Adapter = Mapping[str, LowRank]
"""An adapter: corrections by module path, such as `model.layers.0.self_attn.q_proj` or `lm_head`."""
