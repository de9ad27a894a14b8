"""int8: one byte per weight and one scale for each output feature.

The simplest quantization there is: a row's largest magnitude becomes 127 and everything else is rounded to the grid
that this makes, so `w = q * scale` with `scale = max |row| / 127`. The grid is symmetric: zero stays zero. A weight is
off by at most half a step, `scale / 2`.

The result is half the size of bf16 and hardly distinguishable from it. One outlier makes its whole row coarse; this is
what groups (`int4`) and blocks (`nf4`, `ggml`) are for.

Source: Jacob et al., "Quantization and Training of Neural Networks" (2018), section 2, per channel and symmetric.
"""

import torch
from torch import Tensor

from llamarium.quant.base import QuantizedLinear


class Linear8bit(QuantizedLinear):
    """A Linear over int8 codes.

    Attributes:
        weight: int8, (out_features, in_features), from -127 to 127.
        scale: float32, (out_features, 1).
    """

    scale: Tensor

    def __init__(self, in_features: int, out_features: int, *, device: torch.device | str | None = None) -> None:
        """Make room for a weight without filling it; `from_weight` fills."""
        super().__init__(in_features, out_features)
        self.register_buffer("weight", torch.empty(out_features, in_features, dtype=torch.int8, device=device))
        self.register_buffer("scale", torch.empty(out_features, 1, device=device))

    @classmethod
    def from_weight(cls, weight: Tensor) -> "Linear8bit":
        """Quantize (out_features, in_features). A row that holds NaN or an infinity comes back as NaN."""
        linear = cls(weight.shape[1], weight.shape[0], device=weight.device)
        for start, stop in linear.chunks():
            rows = weight[start:stop].detach().float()
            scale = rows.abs().amax(-1, keepdim=True) / 127
            # A row of zeros has scale 0: 0 / 0 is NaN, and its codes are 0.
            linear.weight[start:stop] = (rows / scale).nan_to_num(0.0).round().clamp_(-127, 127)
            linear.scale[start:stop] = scale
        return linear

    def dequantize_rows(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Return rows `start` to `stop` of W."""
        return self.weight[start:stop].float().mul_(self.scale[start:stop]).to(dtype)
