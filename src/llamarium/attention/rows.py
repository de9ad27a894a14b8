"""Attention over whole rows in C, forward and backward, where the CPU's kernels can compute it.

PyTorch's attention on a CPU takes several times as long as the products in it, most of all its backward pass in
bfloat16. `native/row_attention.c` computes all sums in float32, repeats no keys for groups of queries, reads segments
as they are instead of a T x T mask, and gives the same bits for every number of threads. `attend_eagerly` is the
definition that both are held to.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from llamarium.kernels import native

_DTYPES = {torch.float32: 0, torch.bfloat16: 1}  # LM_FLOAT32, LM_BFLOAT16
_HEAD_DIM_STEP = 16


class RowMask(NamedTuple):
    """What a token does not see of its row: other segments' tokens, (B, T) int32, and those after it."""

    segments_BT: Tensor | None
    causal: bool


def can_attend_rows(q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> bool:
    """Whether the kernels take these: float32 or bfloat16 in a CPU's memory, not to be compiled by PyTorch."""
    arrays = (q_BTNH, k_BTKH, v_BTKH)
    return (
        all(type(x) is Tensor and x.device.type == "cpu" and _dtype(x) in _DTYPES for x in arrays)
        and len({_dtype(x) for x in arrays}) == 1
        and q_BTNH.shape[-1] % _HEAD_DIM_STEP == 0
        and not torch.compiler.is_compiling()
        and native.library() is not None
    )


def _dtype(x: Tensor) -> torch.dtype:
    """Return what is attended in: autocast's dtype, as with PyTorch's attention, or the tensor's own."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype


def attend_rows(q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, mask: RowMask) -> Tensor:
    """Return (B, T, N, H), differentiable once; head n reads key-value head n // (N / K).

    Raises:
        MemoryBudgetError: If there is no memory to work in.
    """
    q_BTNH, k_BTKH, v_BTKH = (x.to(_dtype(x)).contiguous() for x in (q_BTNH, k_BTKH, v_BTKH))
    out_BTNH = _AttendRows.apply(q_BTNH, k_BTKH, v_BTKH, mask)
    assert isinstance(out_BTNH, Tensor)
    return out_BTNH


class _AttendRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, mask: RowMask) -> Tensor:
        rows, tokens, heads, _ = q_BTNH.shape
        out_BTNH, log_sums_BNT = torch.empty_like(q_BTNH), q_BTNH.new_empty(rows, heads, tokens, dtype=torch.float32)
        ctx.mask = mask
        arrays = (q_BTNH, k_BTKH, v_BTKH, out_BTNH, log_sums_BNT)
        ctx.save_for_backward(*arrays)
        native.attend_rows(_call(arrays, mask), backward=False)
        return out_BTNH

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator's types
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, None]:
        (grad_BTNH,) = grad_outputs
        q_BTNH, k_BTKH, v_BTKH = ctx.saved_tensors[:3]
        grads = torch.empty_like(q_BTNH), torch.empty_like(k_BTKH), torch.empty_like(v_BTKH)
        native.attend_rows(_call((*ctx.saved_tensors, grad_BTNH.contiguous(), *grads), ctx.mask), backward=True)
        return *grads, None


def _call(arrays: tuple[Tensor, ...], mask: RowMask) -> native.CRowAttention:
    """Return the call's struct: q, k, v, out, log-sums, and of a backward pass out's gradient and those to compute."""
    (rows, tokens, heads, head_dim), kv_heads = arrays[0].shape, arrays[1].shape[2]
    segments = None if mask.segments_BT is None else mask.segments_BT.data_ptr()
    pointers = [x.data_ptr() for x in arrays]
    return native.CRowAttention(
        _DTYPES[arrays[0].dtype], rows, tokens, heads, kv_heads, head_dim, mask.causal, segments, *pointers
    )
