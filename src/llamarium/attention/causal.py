"""Fused attention without a cache: for scoring, and the model's default."""

from torch import Tensor

from llamarium.attention.base import RowAttend, attend_fused


class CausalAttend(RowAttend):
    """Attention through PyTorch's fused kernels; arguments as for `RowAttend`."""

    _mask_B1TT: Tensor | None = None

    def __call__(self, layer_idx: int, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> Tensor:
        """Return (B, T, N, H)."""
        num_tokens, mask_B1TT = q_BTNH.shape[1], self._mask_B1TT
        is_masked = self.segments_BT is not None or (self.window is not None and self.window < num_tokens)
        if is_masked and (mask_B1TT is None or mask_B1TT.shape[-1] != num_tokens):  # built once for all layers
            self._mask_B1TT = self.context(layer_idx, k_BTKH, v_BTKH).visible_BTS.unsqueeze(1)
        mask = self._mask_B1TT if is_masked else None
        return attend_fused(q_BTNH, k_BTKH, v_BTKH, mask, is_causal=not is_masked and not self.bidirectional)
