"""float32 matrix products for training: with oneDNN where PyTorch's are slow, or with the bits of the C kernels.

PyTorch uses MKL, which on AMD processors computes with AVX2 even if they have AVX-512; oneDNN, which PyTorch ships for
bfloat16, takes half the time. The choice depends only on the processor, so a resumed run computes the same bits. The C
kernels take 1.4 to 1.9 times oneDNN's time, with a third of its rounding error (docs/decisions/0044-one-rounding.md).
"""

import functools
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llamarium.kernels import native, structs
from llamarium.kernels.cpu_training import are_plain


@functools.cache
def is_needed() -> bool:
    """Return whether this is an AMD processor with AVX-512 on Linux, and PyTorch has MKL and oneDNN's product."""
    processors = Path("/proc/cpuinfo")
    has_both = hasattr(torch.ops.mkldnn, "_linear_pointwise") and torch.backends.mkl.is_available()
    is_amd = processors.exists() and "AuthenticAMD" in processors.read_text()
    return is_amd and has_both and torch.backends.cpu.get_cpu_capability() == "AVX512"


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """Return x (..., in) times the transposed weight (out, in): (..., out); with oneDNN if it `is_needed`."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "") if is_needed() else F.linear(x, weight)


def multiply_in_c(x: Tensor, weight: Tensor) -> Tensor:
    """Return the same product with the bits that the C kernels compute for each row."""
    rows, columns = (tensor.detach().contiguous() for tensor in (x.flatten(0, -2), weight))
    matrix = structs.CMatrix(structs.Kind["F32"], *weight.shape, columns.data_ptr(), None)
    return torch.from_numpy(native.product(matrix, rows.numpy())).view(*x.shape[:-1], -1)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, in_c: bool = False) -> Any:
    """Return `multiply(x, weight)` or `multiply_in_c`'s with gradients; NotImplemented with a bias or autocast."""
    plain = bias is None and are_plain(x, weight) and not torch.is_autocast_enabled("cpu")
    return _Linear.apply(x, weight, in_c and native.library() is not None) if plain else NotImplemented


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, in_c: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (multiply_in_c if in_c else multiply)(x, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator's types
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None]:
        (grad,), (x, weight), (needs_x, needs_weight, _) = grad_outputs, ctx.saved_tensors, ctx.needs_input_grad
        rows, grads = x.flatten(0, -2), grad.flatten(0, -2)
        grad_x = multiply(grad, weight.T) if needs_x else None
        return grad_x, multiply(grads.T, rows.T) if needs_weight else None, None
