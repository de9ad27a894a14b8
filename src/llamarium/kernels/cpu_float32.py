"""Products in float32 by oneDNN, on processors where PyTorch's own are slow.

They are MKL's, which on AMD's processors computes with AVX2 although they have AVX-512; oneDNN, which it brings for
bfloat16, takes half of the time. The choice follows from the processor alone: a resumed run computes as before.
"""

import functools
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode  # pyright: ignore


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


class OneDNN(TorchFunctionMode):
    """Within it `F.linear` of plain float32 tensors on the CPU, and its gradients, are oneDNN's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, or what takes its place."""
        if func is F.linear and not kwargs and args[2:] in ((), (None,)) and _takes(*args[:2]):
            return _Linear.apply(*args[:2])
        return func(*args, **(kwargs or {}))


def again() -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """Return what `torch.utils.checkpoint` enters to compute, and to compute again in the backward pass: as now."""
    active = isinstance(_get_current_function_mode(), OneDNN)
    return nullcontext(), OneDNN() if active else nullcontext()


def _takes(*arrays: Any) -> bool:
    return not torch.compiler.is_compiling() and all(
        type(x) in (Tensor, nn.Parameter) and x.dtype == torch.float32 and x.device.type == "cpu" for x in arrays
    )


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
