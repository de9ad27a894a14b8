"""Products in float32 by oneDNN, on processors where PyTorch's own are slow.

They are MKL's, which on AMD's processors computes with AVX2 although they have AVX-512; oneDNN, which it brings for
bfloat16, takes half of the time. The choice follows from the processor alone: a resumed run computes as before.
"""

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llamarium.kernels.cpu_training import are_plain


@functools.cache
def is_needed() -> bool:
    """Whether this is an AMD processor with AVX-512 under Linux, and PyTorch has MKL and oneDNN's product."""
    processors = Path("/proc/cpuinfo")
    has_both = hasattr(torch.ops.mkldnn, "_linear_pointwise") and torch.backends.mkl.is_available()
    is_amd = processors.exists() and "AuthenticAMD" in processors.read_text()
    return is_amd and has_both and torch.backends.cpu.get_cpu_capability() == "AVX512"


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """Return x (..., in) times weight (out, in) transposed: (..., out)."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")  # pyright: ignore


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """Return `multiply(x, weight)`, with gradients by oneDNN; NotImplemented with a bias, or under autocast."""
    plain = bias is None and are_plain(x, weight) and not torch.is_autocast_enabled("cpu")
    return _Linear.apply(x, weight) if plain else NotImplemented


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return multiply(x, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator's types
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        (grad,), (x, weight), (needs_x, needs_weight) = grad_outputs, ctx.saved_tensors, ctx.needs_input_grad
        rows, grads = x.flatten(0, -2), grad.flatten(0, -2)
        return (multiply(grad, weight.T) if needs_x else None), (multiply(grads.T, rows.T) if needs_weight else None)
