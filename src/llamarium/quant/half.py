"""A Linear in bf16 or fp16 for CPUs that only store these types.

Nothing is quantized; it stands here because it is one more Linear that is put in place of `nn.Linear` after loading.
Weights, names and results to rounding are the same.
"""

import torch
from torch import Tensor, nn

from llamarium.kernels.cpu_half import linear_half
from llamarium.quant.swap import swap_linears


class HalfLinear(nn.Linear):
    """An `nn.Linear` without bias whose product is `linear_half`."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make an `nn.Linear` without bias."""
        super().__init__(in_features, out_features, bias=False, device=device, dtype=dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Multiply: (..., in_features) to (..., out_features)."""
        return linear_half(input, self.weight)

    def _get_name(self) -> str:
        # print(model) shows the module tree that people know; which kernel runs is shown by `llamarium doctor`.
        return "Linear"


def use_half_linears(model: nn.Module) -> int:
    """Replace every `nn.Linear` of `model` without bias in place by one that shares its parameter.

    Tied weights stay tied, and state-dict keys stay the same.

    Returns:
        How many were replaced.
    """

    def share(name: str, linear: nn.Linear) -> nn.Linear:
        if linear.bias is not None:  # pyright: ignore[reportUnnecessaryComparison]
            return linear
        half = HalfLinear(linear.in_features, linear.out_features, device="meta")
        half.weight = linear.weight
        return half

    return swap_linears(model, share, skip=())
