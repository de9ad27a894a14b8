"""A layer's forward and backward pass on a CPU as one autograd function, with the same products and C calls.

It saves the casts, views, dispatches and graph nodes between them (docs/decisions/0040).
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llamarium.attention.training import attend_backward, attend_forward
from llamarium.kernels import cpu_float32
from llamarium.kernels.cpu_training import RMS_NORM, ROTATE, SWIGLU, compute, products_dtype


class Layer(torch.autograd.Function):
    """A decoder layer of x (B, T, D), cosines and sines (B or 1, T, 1, H) and its parameters, all float32."""

    @staticmethod
    def forward(ctx: Any, options: Any, x_BTD: Tensor, cos: Tensor, sin: Tensor, *weights: Tensor) -> Tensor:
        """Run the layer; `options` are head_dim, both norms' eps, and the mask arguments of `attend_forward`."""
        head_dim, (eps1, eps2), mask = options
        dtype, x1, (norm1, norm2) = products_dtype(x_BTD), x_BTD.flatten(0, 1), (w.contiguous() for w in weights[7:])
        matrices, empty, width = [w.to(dtype) for w in weights[:7]], torch.empty_like, x_BTD.shape[-1]
        outs = empty(x1, dtype=dtype), x1.new_empty(len(x1))
        normed1, root1 = compute(RMS_NORM, dtype, (width, 0, 0, eps1), (x1, norm1), outs)
        q, k, v = (_multiply(normed1, w).view(*x_BTD.shape[:2], -1, head_dim) for w in matrices[:3])
        _turn(ROTATE, (q, k), cos, sin)
        attended = attend_forward(q, k, v, *mask)
        added = _multiply(attended[3].view(len(x1), -1), matrices[3])
        outs = empty(normed1), empty(root1), empty(x1)
        normed2, root2, x2 = compute(RMS_NORM, dtype, (width, 0, 0, eps2), (x1, norm2, added), outs)
        gate, up = (_multiply(normed2, w) for w in matrices[4:6])
        (gated,) = compute(SWIGLU, dtype, (gate.shape[-1],), (gate, up), [empty(gate)])
        saved = (x1, cos, sin, norm1, norm2, normed1, root1, *attended, x2, normed2, root2, gate, up, gated)
        ctx.save_for_backward(*matrices, *saved)
        ctx.mask = mask
        return (x2 + _multiply(gated, matrices[6])).view_as(x_BTD)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator's types
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and the parameters."""
        saved, empty, shape = ctx.saved_tensors, torch.empty_like, grad_outputs[0].shape  # a checkpoint gives them once
        matrices, (x1, cos, sin, norm1, norm2, normed1, root1) = saved[:7], saved[7:14]
        q, k, v, out, logs, x2, normed2, root2, gate, up, gated = saved[14:]
        grad, dtype, width = grad_outputs[0].contiguous().view_as(x1), gated.dtype, shape[-1]
        narrow_grad = grad.to(dtype)
        of_down, grad_gated = _of_weight(narrow_grad, gated), _of_input([narrow_grad], matrices[6:])
        inputs = gate, up, grad_gated
        grads = compute(SWIGLU + 1, dtype, (gate.shape[-1],), inputs, (empty(gate), empty(up)))
        of_gate_up, grad_normed = [_of_weight(each, normed2) for each in grads], _of_input(grads, matrices[4:6])
        inputs, outs = (x2, norm2, root2, grad_normed, grad), (empty(x2), empty(norm2), empty(normed2))
        grad, of_norm2, narrow_grad = compute(RMS_NORM + 1, dtype, (width,), inputs, outs)
        of_o, grad_out = (
            _of_weight(narrow_grad, out.view(len(x1), -1)),
            _of_input([narrow_grad], matrices[3:4]).view_as(out),
        )
        grads = attend_backward((q, k, v, out, logs), grad_out, *ctx.mask)
        _turn(ROTATE + 1, grads[:2], cos, sin)
        grads = [each.view(len(x1), -1) for each in grads]
        of_qkv, grad_normed = [_of_weight(each, normed1) for each in grads], _of_input(grads, matrices[:3])
        inputs = x1, norm1, root1, grad_normed, grad
        grad, of_norm1 = compute(RMS_NORM + 1, dtype, (width,), inputs, (empty(x1), empty(norm1)))
        return None, grad.view(shape), None, None, *of_qkv, of_o, *of_gate_up, of_down, of_norm1, of_norm2


def _multiply(x: Tensor, weight: Tensor) -> Tensor:
    return cpu_float32.multiply(x, weight) if x.dtype == torch.float32 else F.linear(x, weight)


def _of_weight(grad: Tensor, x: Tensor) -> Tensor:
    return _multiply(grad.T, x.T).float()


def _of_input(grads: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    total = _multiply(grads[0], weights[0].T)
    for grad, weight in zip(grads[1:], weights[1:], strict=True):  # oneDNN's product of bfloat16 adds before it rounds
        total = total + _multiply(grad, weight.T) if grad.dtype == torch.float32 else total.addmm_(grad, weight)
    return total


def _turn(op: int, arrays: Sequence[Tensor], cos: Tensor, sin: Tensor) -> None:
    for x in arrays:  # in place
        options = x.shape[2] * x.shape[3], x.shape[3], cos.shape[:2].numel()
        compute(op, x.dtype, options, (x, cos, sin) if op == ROTATE else (cos, sin, x), [x])
