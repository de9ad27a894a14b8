"""Attention for training: over whole rows in C, forward and backward, where the CPU's kernels can compute it.

PyTorch's on a CPU takes several times as long as its products. `native/row_attention.c` computes all sums in float32,
repeats no keys, needs no T x T mask, and gives the same bits for every number of threads. `attend_eagerly` defines it.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import wrap_torch_function

from llamarium.attention.causal import CausalAttend
from llamarium.kernels import native
from llamarium.kernels.cpu_training import DTYPES, products_dtype


class TrainingAttend(CausalAttend):
    """Attention through the kernels in C, or as `CausalAttend` where they do not take it; the same arguments."""

    _segments_BT: Tensor | None = None

    def __call__(self, layer_idx: int, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> Tensor:
        """Return (B, T, N, H), differentiable once, in autocast's dtype or q's; MemoryBudgetError without memory."""
        if not can_attend_rows(q_BTNH, k_BTKH, v_BTKH):
            return super().__call__(layer_idx, q_BTNH, k_BTKH, v_BTKH)
        arrays = [x.to(products_dtype(x)).contiguous() for x in (q_BTNH, k_BTKH, v_BTKH)]
        return attend_rows(*arrays, *self.kernel_mask(q_BTNH.shape[:2]))

    def kernel_mask(self, shape: torch.Size) -> tuple[Tensor | None, bool, int]:
        """Return for the kernels segments (B, T), made once for all layers, whether attention is causal, the window."""
        if self.segments_BT is not None and (self._segments_BT is None or self._segments_BT.shape != shape):
            self._segments_BT = self.segments_BT.to(torch.int32).expand(shape).contiguous()
        return self._segments_BT, not self.bidirectional, self.window or 0


def can_attend_rows(*arrays: Tensor) -> bool:
    """Whether the kernels take queries, keys and values: of float32 or bfloat16 on a CPU, not compiled by PyTorch."""
    return (
        all(type(x) is Tensor and x.device.type == "cpu" and products_dtype(x) in DTYPES for x in arrays)
        and len({products_dtype(x) for x in arrays}) == 1
        and arrays[0].shape[-1] % 16 == 0
        and not torch.compiler.is_compiling()
        and native.library() is not None
    )


@wrap_torch_function(lambda *given, **_: given)
def attend_rows(*given: Any, as_pass: bool = False) -> Any:
    """Attend in C; `as_pass` with the bits of a pass, NotImplemented for what a pass does not do."""
    *arrays, segments_BT, causal, window = given
    fits = not as_pass or (arrays[0].dtype == torch.float32 and segments_BT is None and causal)
    return _AttendRows.apply(*arrays, segments_BT, causal, window, as_pass) if fits else NotImplemented


class _AttendRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, *how: Any) -> Tensor:
        arrays = attend_forward(q_BTNH, k_BTKH, v_BTKH, *how)
        ctx.save_for_backward(*arrays)
        ctx.how = how
        return arrays[3]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator's types
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        return *attend_backward(ctx.saved_tensors, grad_outputs[0], *ctx.how), None, None, None, None


def attend_forward(q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, *how: Any) -> tuple[Tensor, ...]:
    """Return the three, which are contiguous, the output and each query's log of its sum of exponentials (B, N, T)."""
    rows, tokens, heads, _ = q_BTNH.shape
    out_BTNH, log_sums_BNT = torch.empty_like(q_BTNH), q_BTNH.new_empty(rows, heads, tokens, dtype=torch.float32)
    arrays = (q_BTNH, k_BTKH, v_BTKH, out_BTNH, log_sums_BNT)
    native.attend_rows(_call(arrays, *how), backward=False)
    return arrays


def attend_backward(arrays: tuple[Tensor, ...], grad_BTNH: Tensor, *how: Any) -> list[Tensor]:
    """Return the gradients of queries, keys and values, from what `attend_forward` returned and the output's."""
    grad_BTNH = grad_BTNH.contiguous()  # a name of its own: a copy must live while C reads it
    grads = [torch.empty_like(x) for x in arrays[:3]]
    native.attend_rows(_call((*arrays, grad_BTNH, *grads), *how), backward=True)
    return grads


def _call(arrays: tuple[Tensor, ...], segments_BT: Tensor | None, *how: int) -> native.CRowAttention:
    """Return the call's struct; `arrays` are q, k, v, out, log-sums, out's gradient, and the gradients to compute."""
    (rows, tokens, heads, head_dim), kv_heads = arrays[0].shape, arrays[1].shape[2]
    pointers = [None if x is None else x.data_ptr() for x in (segments_BT, *arrays)]
    return native.CRowAttention(DTYPES[arrays[0].dtype], rows, tokens, heads, kv_heads, head_dim, *how, *pointers)
