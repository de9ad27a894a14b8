"""Base classes of quantized Linears and embeddings.

A quantized Linear stores its weight as codes and scales, in buffers, and dequantizes it at each use. This module
implements the matrix product, its gradient, and moving between devices. A format adds `dequantize_rows`.

The forward pass dequantizes a few rows (output features) at a time, so that the head of a large vocabulary needs no
more memory than a small layer, and the rows are still in the processor's cache when the product reads them. The
backward pass dequantizes again instead of saving the rows of the forward pass; with frozen 4-bit weights and trained
adapters (QLoRA) autograd would otherwise keep the whole model in float.

Source: the recomputation is that of bitsandbytes' `MatMul4Bit`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llamarium.kernels.cpu_half import dtype_of_products, linear_half

# Weights that are dequantized at a time: 4 MiB of float32.
_CHUNK_WEIGHTS = 2**20


class QuantizedModule(nn.Module):
    """A module whose buffers are codes and scales.

    `.to(dtype)` and `.half()` do not change the scales, because another precision would change the weights. Moving to a
    device preserves sharing between tensors, such as those of a tied head.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for name, buffer in self.named_buffers(recurse=False):
            moved = fn(buffer)
            if moved.dtype != buffer.dtype:
                moved = buffer.to(moved.device)
            if buffer.is_meta or moved.is_meta:  # no storage to share
                setattr(self, name, moved)
            else:
                buffer.data = moved  # in place, as torch does for parameters, so that sharing tensors move too
        return self


class QuantizedEmbedding(QuantizedModule, ABC):
    """A quantized embedding table that dequantizes only the rows that are looked up.

    Attributes:
        weight: Codes, in the layout of the format; shared with the head of a tied model.
        type_name: Quantized type of the codes.
        dtype: Dtype of the returned vectors.
    """

    weight: Tensor

    def __init__(self, weight: Tensor, shape: tuple[int, int], type_name: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = shape
        self.type_name, self.dtype = type_name, dtype
        self.register_buffer("weight", weight)

    def extra_repr(self) -> str:
        """Return the sizes, as `nn.Embedding`, and the type."""
        return f"{self.num_embeddings}, {self.embedding_dim}, type={self.type_name}"

    @abstractmethod
    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Dequantize the whole table, (num_embeddings, embedding_dim)."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        # `.to(dtype)` changes the dtype of the returned vectors, as for nn.Embedding, but not the codes.
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        return super()._apply(fn, recurse)


class QuantizedLinear(QuantizedModule, ABC):
    """A Linear, `y = x W^T + b`, with quantized W.

    Attributes:
        bias: b, (out_features,), in floating point; None if there is none.
        weight: Codes of W, in the layout of the format.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.register_buffer("bias", None)

    @abstractmethod
    def dequantize_rows(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Dequantize rows `start` to `stop` of W, (stop - start, in_features)."""

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Dequantize W, (out_features, in_features)."""
        out = torch.empty(self.out_features, self.in_features, dtype=dtype, device=self.weight.device)
        for start, stop in self.chunks():
            out[start:stop] = self.dequantize_rows(start, stop, dtype)
        return out

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b: (..., in_features) to (..., out_features), in x's dtype.

        Equal to `F.linear(x, self.dequantize(x.dtype), self.bias)`, computed in chunks of rows.
        """
        y: Tensor = _Product.apply(x, self)  # pyright: ignore[reportAssignmentType]
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Yield the ranges (start, stop) of rows that are dequantized together."""
        step = max(1, _CHUNK_WEIGHTS // self.in_features)
        for start in range(0, self.out_features, step):
            yield start, min(start + step, self.out_features)

    def extra_repr(self) -> str:
        """Return the same text as `nn.Linear`."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class _Product(torch.autograd.Function):
    """The product with a frozen quantized weight: a gradient for x, none for the codes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: QuantizedLinear) -> Tensor:
        ctx.module = module
        product = linear_half if x.dtype in (torch.bfloat16, torch.float16) else F.linear
        parts = [product(x, module.dequantize_rows(*rows, x.dtype)) for rows in module.chunks()]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        (grad,) = grad_outputs
        total: Tensor | None = None
        dtype = dtype_of_products(grad)
        for start, stop in ctx.module.chunks():
            weight = ctx.module.dequantize_rows(start, stop, grad.dtype)  # the same values as in the forward pass
            part = (grad[..., start:stop].to(dtype) @ weight.to(dtype)).float()
            total = part if total is None else total.add_(part)
        assert total is not None
        return total.to(grad.dtype), None
