"""The glass box: any Attend, with what it saw written down."""

from collections.abc import Callable

from torch import Tensor

from llamarium.attention.base import Eager, TransparentAttend, attend_eagerly


class RecordingAttend:
    """A decorator: the answer is the inner object's own; the record is recomputed from the same q and k.

    So the path that is shown is the path that runs, to the bit, and the fast kernels need no hooks.

    Args:
        inner: What really attends.
        record: Called once a layer with the layer's index, q, k and v of the call, and the attention written out.
            Its `out_BTNH` is the recomputed one; the inner object's own output is what the model continues with.
    """

    def __init__(self, inner: TransparentAttend, record: Callable[[int, Tensor, Tensor, Tensor, Eager], None]) -> None:
        self.inner = inner
        self.record = record

    def __call__(self, layer_idx: int, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> Tensor:
        """Return the inner object's (B, T, N, H)."""
        out_BTNH = self.inner(layer_idx, q_BTNH, k_BTKH, v_BTKH)
        seen = attend_eagerly(q_BTNH, self.inner.context(layer_idx, k_BTKH, v_BTKH))
        self.record(layer_idx, q_BTNH, k_BTKH, v_BTKH, seen)
        return out_BTNH
