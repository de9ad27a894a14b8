"""Attention for training in C, forward and backward, where the CPU kernels support it.

On a CPU, PyTorch's attention takes several times as long as its matrix products. `native/row_attention.c` sums in
float32, needs no repeated keys and no T x T mask, and its bits do not depend on the number of threads. `attend_eagerly`
defines the result.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import wrap_torch_function

from llamarium.attention.base import CausalAttend
from llamarium.kernels import native, structs
from llamarium.kernels.cpu_training import DTYPES, products_dtype


class TrainingAttend(CausalAttend):
    """Attention by the C kernels, or as `CausalAttend` if they do not support the inputs; the same arguments."""

    _segments_BT: Tensor | None = None

    def __call__(self, layer_idx: int, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> Tensor:
        """Return (B, T, N, H), differentiable once, in autocast's dtype or q's.

        Raises:
            MemoryBudgetError: If there is not enough memory.
        """
        if not can_attend_rows(q_BTNH, k_BTKH, v_BTKH):
            return super().__call__(layer_idx, q_BTNH, k_BTKH, v_BTKH)
        arrays = [x.to(products_dtype(x)).contiguous() for x in (q_BTNH, k_BTKH, v_BTKH)]
        return attend_rows(*arrays, *self.kernel_mask(q_BTNH.shape[:2]))

    def kernel_mask(self, shape: torch.Size) -> tuple[Tensor | None, bool, int]:
        """Return the kernels' mask: segments (B, T), built once for all layers, causality, and the window."""
        if self.segments_BT is not None and (self._segments_BT is None or self._segments_BT.shape != shape):
            self._segments_BT = self.segments_BT.to(torch.int32).expand(shape).contiguous()
        return self._segments_BT, not self.bidirectional, self.window or 0


def can_attend_rows(*arrays: Tensor) -> bool:
    """Return whether the kernels support the inputs: float32 or bfloat16 on a CPU, outside `torch.compile`."""
    return (
        all(type(x) is Tensor and x.device.type == "cpu" and products_dtype(x) in DTYPES for x in arrays)
        and len({products_dtype(x) for x in arrays}) == 1
        and arrays[0].shape[-1] % 16 == 0
        and not torch.compiler.is_compiling()
        and native.library() is not None
    )


@wrap_torch_function(lambda *arguments, **_: arguments)
def attend_rows(*arguments: Any, as_pass: bool = False) -> Any:
    """Compute attention in C; with `as_pass`, with the bits of inference, or NotImplemented if it does not apply."""
    *arrays, segments_BT, causal, window = arguments
    fits = not as_pass or (arrays[0].dtype == torch.float32 and segments_BT is None and causal)
    return _AttendRows.apply(*arrays, segments_BT, causal, window, as_pass) if fits else NotImplemented


class _AttendRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, *mask: Any) -> Tensor:
        arrays = attend_forward(q_BTNH, k_BTKH, v_BTKH, *mask)
        ctx.save_for_backward(*arrays)
        ctx.mask = mask
        return arrays[3]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator's types
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        return *attend_backward(ctx.saved_tensors, grad_outputs[0], *ctx.mask), None, None, None, None


def attend_forward(q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, *mask: Any) -> tuple[Tensor, ...]:
    """Return q, k and v, which must be contiguous, the output, and each query's log-sum-exp (B, N, T)."""
    rows, tokens, heads, _ = q_BTNH.shape
    out_BTNH, log_sums_BNT = torch.empty_like(q_BTNH), q_BTNH.new_empty(rows, heads, tokens, dtype=torch.float32)
    arrays = (q_BTNH, k_BTKH, v_BTKH, out_BTNH, log_sums_BNT)
    native.attend_rows(_call(arrays, *mask), backward=False)
    return arrays


def attend_backward(arrays: tuple[Tensor, ...], grad_BTNH: Tensor, *mask: Any) -> list[Tensor]:
    """Return the gradients of q, k and v, from the result of `attend_forward` and the output's gradient."""
    grad_BTNH = grad_BTNH.contiguous()  # bound to a name, because a copy must stay alive while C reads it
    grads = [torch.empty_like(x) for x in arrays[:3]]
    native.attend_rows(_call((*arrays, grad_BTNH, *grads), *mask), backward=True)
    return grads


def _call(arrays: tuple[Tensor, ...], segments_BT: Tensor | None, *mask: int) -> structs.CRowAttention:
    """Return the call's struct; `arrays` are q, k, v, out, log-sums, out's gradient, and the gradients to compute."""
    (rows, tokens, heads, head_dim), kv_heads = arrays[0].shape, arrays[1].shape[2]
    pointers = [None if x is None else x.data_ptr() for x in (segments_BT, *arrays)]
    return structs.CRowAttention(DTYPES[arrays[0].dtype], rows, tokens, heads, kv_heads, head_dim, *mask, *pointers)
