"""Attention without a past: training, scoring, and the model's default."""

from torch import Tensor

from llamarium.attention.base import RowAttend, attend_fused


class CausalAttend(RowAttend):
    """Attention through PyTorch's fused kernels; arguments as for `RowAttend`."""

    _mask_B1TT: Tensor | None = None

    def __call__(self, layer_idx: int, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> Tensor:
        """Return (B, T, N, H)."""
        if self._mask_B1TT is None and self.segments_BT is not None:  # once for all layers
            self._mask_B1TT = self.context(layer_idx, k_BTKH, v_BTKH).visible_BTS.unsqueeze(1)
        is_causal = self.segments_BT is None and not self.bidirectional
        return attend_fused(q_BTNH, k_BTKH, v_BTKH, self._mask_B1TT, is_causal=is_causal)
