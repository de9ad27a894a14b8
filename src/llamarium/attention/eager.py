"""The oracle: attention as the paper writes it, in float32, with nothing fused."""

from torch import Tensor

from llamarium.attention.base import Context, attend_eagerly, visible_in_row


class EagerAttend:
    """Causal attention by explicit softmax in float32; keeps nothing.

    Args:
        segments_BT: int; tokens of different numbers do not see each other (packed rows, padding).
        bidirectional: Every token sees its whole segment, as in an encoder.
    """

    def __init__(self, *, segments_BT: Tensor | None = None, bidirectional: bool = False) -> None:
        self.segments_BT = segments_BT
        self.bidirectional = bidirectional

    def __call__(self, layer_idx: int, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> Tensor:
        """Return (B, T, N, H)."""
        return attend_eagerly(q_BTNH, self.context(layer_idx, k_BTKH, v_BTKH)).out_BTNH

    def context(self, layer_idx: int, k_BTKH: Tensor, v_BTKH: Tensor) -> Context:
        """The call's own keys and values; nothing else exists."""
        mask = visible_in_row(k_BTKH.shape[1], self.segments_BT, self.bidirectional, k_BTKH.device)
        return Context(k_BTKH, v_BTKH, mask)
