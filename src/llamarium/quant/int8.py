"""int8: one byte per weight and one scale for each group of 32.

The simplest quantization there is: a group's largest magnitude becomes 127 and everything else is rounded to the grid
that this makes, so `w = q * scale` with `scale = max |group| / 127`. The grid is symmetric: zero stays zero. A weight
is off by at most half a step, `scale / 2`, and what is rounded of the scale, which is a float16.

The result takes 8.5 bits a weight, as GGUF's Q8_0, and is hardly distinguishable from bf16. An outlier makes its group
coarse and no other. Rows that are no multiple of 32 use the largest power of two that divides them.

Source: Jacob et al., "Quantization and Training of Neural Networks" (2018), section 2, symmetric; the groups and
float16 scales of ggml's Q8_0.
"""

import math

import torch
from torch import Tensor

from llamarium.quant.base import QuantizedLinear

_GROUP_SIZE = 32


class Linear8bit(QuantizedLinear):
    """A Linear over int8 codes.

    Attributes:
        weight: int8, (out_features, in_features), from -127 to 127.
        scale: float16, (out_features, groups).
    """

    scale: Tensor

    type_name: str = "Q8_0"

    def __init__(self, in_features: int, out_features: int, *, device: torch.device | str | None = None) -> None:
        """Make room for a weight without filling it; `from_weight` fills."""
        super().__init__(in_features, out_features)
        self.register_buffer("weight", torch.empty(out_features, in_features, dtype=torch.int8, device=device))
        groups = in_features // math.gcd(in_features, _GROUP_SIZE)
        self.register_buffer("scale", torch.empty(out_features, groups, dtype=torch.float16, device=device))

    @classmethod
    def from_weight(cls, weight: Tensor) -> "Linear8bit":
        """Quantize (out_features, in_features). A group that holds NaN or an infinity comes back as NaN."""
        linear = cls(weight.shape[1], weight.shape[0], device=weight.device)
        for start, stop in linear.chunks():
            groups = weight[start:stop].detach().float().view(stop - start, linear.scale.shape[1], -1)
            scale = (groups.abs().amax(-1, keepdim=True) / 127).half().float()
            # A group of zeros has scale 0: 0 / 0 is NaN, and its codes are 0.
            codes = (groups / scale).nan_to_num(0.0).round().clamp_(-127, 127)
            linear.weight[start:stop], linear.scale[start:stop] = codes.flatten(1), scale.squeeze(-1)
        return linear

    def dequantize_rows(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Return rows `start` to `stop` of W."""
        scale = self.scale[start:stop].float().unsqueeze(-1)
        return self.weight[start:stop].float().view(*scale.shape[:2], -1).mul(scale).flatten(1).to(dtype)
