"""An adapter as runners take it: two small matrices beside each of some Linears. Never torch.

    y = gain * (W x + scale * b (a x))

with a gain for DoRA alone: the learned length of each row over the length that the row has.
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
"""The seven Linears of a layer, by the short names that C has for them: the one table of their paths within a layer."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """The correction of one Linear; arrays are C-contiguous.

    Attributes:
        scale: What b (a x) is multiplied by.
        a: float32 (rank, in).
        b: float32 (out, rank).
        gain: float32 (out,), DoRA's; None without.
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
        """Return rows of W, or of W x, corrected by those of b a, or of b a x."""
        out_OX = base_OX + np.multiply(low_OX, self.scale, dtype=np.float32)
        return out_OX if self.gain is None else out_OX * self.gain[rows, None]


Adapter = Mapping[str, LowRank]
"""One adapter: the corrections by the Linears' names, such as `model.layers.0.self_attn.q_proj` or `lm_head`."""
