"""The glass box: any Attend, with what it saw written down."""

from collections.abc import Callable

from torch import Tensor

from llamarium.attention.base import Context, TransparentAttend


class RecordingAttend:
    """A decorator: the answer is the inner object's own, and the recorder gets what the queries looked at.

    So the path that is shown is the path that runs, to the bit, and the fast kernels need no hooks. The scores and the
    pattern, which no fused kernel ever holds, follow from `attend_eagerly(q, context)`: the recorder computes them for
    the layers and queries that it wants, and pays for no others.

    Args:
        inner: What really attends.
        record: Called once a layer with the layer's index, the call's q, and the context of keys, values and mask.
    """

    def __init__(self, inner: TransparentAttend, record: Callable[[int, Tensor, Context], None]) -> None:
        self.inner = inner
        self.record = record

    def __call__(self, layer_idx: int, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> Tensor:
        """Return the inner object's (B, T, N, H)."""
        out_BTNH = self.inner(layer_idx, q_BTNH, k_BTKH, v_BTKH)
        self.record(layer_idx, q_BTNH, self.inner.context(layer_idx, k_BTKH, v_BTKH))
        return out_BTNH
