"""Attention without a past: training, scoring, and the model's default."""

import torch.nn.functional as F
from torch import Tensor

from llamarium.attention.base import RowAttend


class CausalAttend(RowAttend):
    """Attention through PyTorch's fused kernels; arguments as for `RowAttend`."""

    _mask_B1TT: Tensor | None = None

    def __call__(self, layer_idx: int, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> Tensor:
        """Return (B, T, N, H)."""
        if self._mask_B1TT is None and self.segments_BT is not None:  # once for all layers
            self._mask_B1TT = self.context(layer_idx, k_BTKH, v_BTKH).visible_BTS.unsqueeze(1)
        out_BNTH = F.scaled_dot_product_attention(
            q_BTNH.transpose(1, 2),
            k_BTKH.transpose(1, 2),
            v_BTKH.transpose(1, 2),
            attn_mask=self._mask_B1TT,
            is_causal=self.segments_BT is None and not self.bidirectional,
            enable_gqa=True,
        )
        return out_BNTH.transpose(1, 2)
