"""Pointwise operations of training on a CPU, in C: norms, RoPE and SwiGLU, with their gradients.

PyTorch's versions make several passes over memory, with casts by autocast in between. These read and write the dtype of
the matrix products (bfloat16 under autocast), compute in float32 and save only their inputs. `Replaced` substitutes
them for the model's methods, which define the semantics and still run for arguments that these do not support.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode  # pyright: ignore
from torch.utils.checkpoint import checkpoint

from llamarium.kernels import native, structs

DTYPES = {torch.float32: 0, torch.bfloat16: 1}  # LM_FLOAT32, LM_BFLOAT16
RMS_NORM, SWIGLU, ROTATE = 0, 2, 4  # LM_RMS_NORM and so on; add 1 for the backward pass


class Replaced(TorchFunctionMode):
    """A context that replaces functions; replacements return NotImplemented for arguments they do not support.

    Args:
        by: Replacements by original: PyTorch functions, or those marked by `torch.overrides.wrap_torch_function`.
    """

    def __init__(self, by: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self._by = by

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function or its replacement."""
        replacement = None if torch.compiler.is_compiling() else self._by.get(func)
        result = NotImplemented if replacement is None else replacement(*args, **(kwargs or {}))
        if result is not NotImplemented:
            return result
        inner = getattr(func, "replaceable", None)  # a method, which may call other replaced functions
        with self if inner else nullcontext():
            return (inner or func)(*args, **(kwargs or {}))


def checkpointed(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """Call a function with activation checkpointing: the backward pass computes it again, with the same replacements.

    Without gradients it is a plain call. Under `torch.compile` nothing is replaced, and a `context_fn` would select
    selective checkpointing, which keeps everything.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    options: dict[str, Any] = {} if torch.compiler.is_compiling() else {"context_fn": _contexts}
    return checkpoint(function, *args, use_reentrant=False, **options)  # pyright: ignore[reportReturnType]


def _contexts() -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    active = _get_current_function_mode()
    return nullcontext(), active if isinstance(active, Replaced) else nullcontext()


def are_plain(*arrays: Any, dtypes: Sequence[torch.dtype] = (torch.float32,)) -> bool:
    """Whether these are tensors in the CPU's memory, no subclass, of one of some dtypes."""
    return all(type(x) in (Tensor, nn.Parameter) and x.dtype in dtypes and x.device.type == "cpu" for x in arrays)


def products_dtype(x: Tensor) -> torch.dtype:
    """Return autocast's dtype, or x's own."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Any:
    """Return the RMS norm of x (..., D) in the dtype of products; D must be a multiple of 16."""
    fits = are_plain(x, weight, dtypes=[*DTYPES]) and x.shape[-1] % 16 == 0
    fits = fits and torch.promote_types(weight.dtype, x.dtype) == x.dtype
    fits = fits and weight.shape == x.shape[-1:] and products_dtype(x) in (torch.bfloat16, x.dtype)
    return _computed(fits, RMS_NORM, products_dtype(x), (x.shape[-1], 0, 0, eps), x, weight.float())


def swiglu(gate: Tensor, up: Tensor) -> Any:
    """Return silu(gate) * up, (..., F), rounded once; F must be a multiple of 16."""
    fits = are_plain(gate, up, dtypes=[*DTYPES]) and gate.dtype == up.dtype
    fits = fits and gate.shape == up.shape and gate.shape[-1] % 16 == 0
    return _computed(fits, SWIGLU, gate.dtype, (gate.shape[-1],), gate, up)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """Apply RoPE to x (B, T, N, H) with angles (B or 1, T, 1, H), in x's dtype; H must be a multiple of 32."""
    if x.dim() != 4:
        return NotImplemented
    rows, tokens, heads, head_dim = x.shape
    fits = are_plain(x, cos, sin, dtypes=[*DTYPES]) and head_dim % 32 == 0 and sin.shape == cos.shape
    fits = fits and cos.shape in ((1, tokens, 1, head_dim), (rows, tokens, 1, head_dim))
    options = heads * head_dim, head_dim, cos.shape[:2].numel()
    return _computed(fits, ROTATE, x.dtype, options, x, cos.float(), sin.float())


def _computed(fits: bool, *arguments: Any) -> Any:
    return _InC.apply(*arguments) if fits and native.library() is not None else NotImplemented


def compute(
    op: int, dtype: torch.dtype, options: tuple[Any, ...], inputs: Sequence[Tensor], outputs: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Run an operation in C on contiguous tensors and return `outputs`; `options` are C's fields from `columns` on."""
    fields = op, DTYPES[dtype], DTYPES.get(inputs[0].dtype, 0), outputs[0].numel() // options[0], *options
    addresses = [tuple(x.data_ptr() for x in arrays) for arrays in (inputs, outputs)]
    native.compute_pointwise(structs.CPointwise(*fields, inputs=addresses[0], outputs=addresses[1]))
    return outputs


class _InC(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: int, dtype: torch.dtype, options: tuple[Any, ...], *tensors: Tensor) -> Tensor:
        inputs = [x.contiguous() for x in tensors]
        outputs = [torch.empty_like(inputs[0], dtype=dtype)]
        if op == RMS_NORM:
            outputs.append(inputs[1].new_empty(inputs[0].shape[:-1]))
        compute(op, dtype, options, inputs, outputs)
        ctx.op, ctx.dtype, ctx.options = op + 1, dtype, options
        ctx.save_for_backward(*inputs[op == ROTATE :], *outputs[1:])  # the gradient of RoPE does not need x
        return outputs[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator's types
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        grad, saved = grad_outputs[0].contiguous(), ctx.saved_tensors  # which a checkpoint gives once
        grads = [torch.empty_like(x) for x in ([grad] if ctx.op == ROTATE + 1 else saved[:2])]
        compute(ctx.op, ctx.dtype, ctx.options, [*saved, grad], grads)
        return None, None, None, *grads, *[None] * (len(ctx.needs_input_grad) - 3 - len(grads))


def clip_grad_norm(parameters: Sequence[Tensor], max_norm: float) -> float:
    """Scale gradients down to a total norm of `max_norm` and return the norm before, in one C call if possible."""
    grads: Any = [p.grad for p in parameters]
    if are_plain(*grads) and all(grad.is_contiguous() for grad in grads) and native.library() is not None:
        return native.clip([grad.data_ptr() for grad in grads], [grad.numel() for grad in grads], max_norm)
    return float(torch.nn.utils.clip_grad_norm_(parameters, max_norm))  # sync: decides whether to update
