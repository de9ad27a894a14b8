"""RMSNorm: divide by the root mean square, then scale each feature."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llamarium.model.replaceable import replaceable


class LlamaRMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight, over the last axis.

    The division is done in float32 and rounded to x's dtype before the weight is applied. In bfloat16 this order
    affects the result, and published weights were trained with it.

    Args:
        hidden_size: D.
        eps: Added to the mean square.

    Source: Zhang & Sennrich 2019; transformers' `LlamaRMSNorm` for the order of the casts.
    """

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    @replaceable
    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the same shape and dtype."""
        return self.weight * F.rms_norm(x_BTD, (x_BTD.shape[-1],), None, self.eps)  # divides in float32, then rounds

    def extra_repr(self) -> str:
        """Shape and eps, as the ecosystem prints them."""
        return f"{tuple(self.weight.shape)}, eps={self.eps}"
