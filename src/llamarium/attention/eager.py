"""The reference implementation of attention: as in the paper, in float32, nothing fused."""

from torch import Tensor

from llamarium.attention.base import RowAttend, attend_eagerly


class EagerAttend(RowAttend):
    """Attention by explicit softmax in float32; arguments as for `RowAttend`."""

    def __call__(self, layer_idx: int, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> Tensor:
        """Return (B, T, N, H)."""
        return attend_eagerly(q_BTNH, self.context(layer_idx, k_BTKH, v_BTKH)).out_BTNH
