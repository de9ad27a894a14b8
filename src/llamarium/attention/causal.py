"""Attention without a past: training, scoring, and the model's default."""

import torch.nn.functional as F
from torch import Tensor

from llamarium.attention.base import Context, visible_in_row


class CausalAttend:
    """Causal attention through PyTorch's fused kernels; keeps nothing.

    Args:
        segments_BT: int; tokens of different numbers do not see each other. For packed rows number the documents;
            for padding give the padding a number of its own.
        bidirectional: Every token sees its whole segment, as in an encoder.
    """

    def __init__(self, *, segments_BT: Tensor | None = None, bidirectional: bool = False) -> None:
        self.segments_BT = segments_BT
        self.bidirectional = bidirectional
        self._mask_B1TT: Tensor | None = None

    def __call__(self, layer_idx: int, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> Tensor:
        """Return (B, T, N, H)."""
        out_BNTH = F.scaled_dot_product_attention(
            q_BTNH.transpose(1, 2),
            k_BTKH.transpose(1, 2),
            v_BTKH.transpose(1, 2),
            attn_mask=self._mask(k_BTKH),
            is_causal=self.segments_BT is None and not self.bidirectional,
            enable_gqa=True,
        )
        return out_BNTH.transpose(1, 2)

    def context(self, layer_idx: int, k_BTKH: Tensor, v_BTKH: Tensor) -> Context:
        """The call's own keys and values; nothing else exists."""
        mask = visible_in_row(k_BTKH.shape[1], self.segments_BT, self.bidirectional, k_BTKH.device)
        return Context(k_BTKH, v_BTKH, mask)

    def _mask(self, k_BTKH: Tensor) -> Tensor | None:
        """The mask that segments need, made once and shared by the layers; None where the kernel knows it."""
        if self.segments_BT is None:
            return None
        if self._mask_B1TT is None:
            mask = visible_in_row(k_BTKH.shape[1], self.segments_BT, self.bidirectional, k_BTKH.device)
            self._mask_B1TT = mask.unsqueeze(1)
        return self._mask_B1TT
