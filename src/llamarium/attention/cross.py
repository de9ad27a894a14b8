"""Cross-attention: the decoder's queries, the encoder's keys and values."""

from collections.abc import Sequence

from torch import Tensor

from llamarium.attention.base import attend_fused


class CrossAttend:
    """Cross-attention to a fixed memory; the k and v of the call itself are ignored.

    The memory comes from the same attention modules: `attention.project(encoder_hidden)` returns k and v of the
    encoder's hidden states, without RoPE.

    Args:
        memory: A (k, v) pair of (B, S, K, H) per layer.
        visible_BS: bool; False at padding. None means no padding.
    """

    def __init__(self, memory: Sequence[tuple[Tensor, Tensor]], visible_BS: Tensor | None = None) -> None:
        self.memory = memory
        self.visible_BS = visible_BS

    def __call__(self, layer_idx: int, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> Tensor:
        """Return (B, T, N, H)."""
        mask_B11S = None if self.visible_BS is None else self.visible_BS[:, None, None, :]
        return attend_fused(q_BTNH, *self.memory[layer_idx], mask_B11S)
