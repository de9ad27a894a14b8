"""4-bit integers in groups: evenly spaced levels between the smallest and the largest weight of each group.

32 consecutive weights of a row form a group. Sixteen levels span it from its smallest weight to its largest:
`w = minimum + q * step` with `step = (largest - smallest) / 15`. The grid is asymmetric, since few groups are
centred on zero, and a weight is off by at most half a step and what is rounded of step and minimum.

Step and minimum are float16, 32 bits for 32 weights, so a weight costs 5 bits, as in GGUF's Q4_1. Rows that are no
multiple of 32 use groups of 16.

The storage is neutral: codes in the weights' order, two in a byte, the first in the low half. What a machine likes
better is packed from it at load, without loss (`packed.py`).

Source: the grid of GPTQ and AWQ checkpoints (Frantar et al., 2022; Lin et al., 2023), rounded to nearest; the groups
and float16 scales of ggml's Q4_1.
"""

import torch
from torch import Tensor

from llamarium.quant.base import QuantizedLinear
from llamarium.quant.formats import group_size


class LinearInt4(QuantizedLinear):
    """A Linear over 4-bit codes in groups.

    Attributes:
        weight: uint8, (out_features, in_features / 2): weight 2i in the low half of byte i, 2i + 1 in the high half.
        step, minimum: float16, (out_features, groups).
    """

    step: Tensor
    minimum: Tensor

    type_name: str = "Q4_1"

    def __init__(self, in_features: int, out_features: int, *, device: torch.device | str | None = None) -> None:
        """Make room for a weight without filling it; `from_weight` fills.

        Raises:
            OptionError: If `in_features` is no multiple of 16.
        """
        super().__init__(in_features, out_features)
        num_groups = in_features // group_size(in_features)
        self.register_buffer("weight", torch.empty(out_features, in_features // 2, dtype=torch.uint8, device=device))
        self.register_buffer("step", torch.empty(out_features, num_groups, dtype=torch.float16, device=device))
        self.register_buffer("minimum", torch.empty(out_features, num_groups, dtype=torch.float16, device=device))

    @classmethod
    def from_weight(cls, weight: Tensor) -> "LinearInt4":
        """Quantize (out_features, in_features). A group that holds NaN or an infinity comes back as NaN, or infinite.

        Raises:
            OptionError: If `in_features` is no multiple of 16.
        """
        linear = cls(weight.shape[1], weight.shape[0], device=weight.device)
        for start, stop in linear.chunks():
            groups = weight[start:stop].detach().float().view(stop - start, linear.step.shape[1], -1)
            smallest, largest = groups.aminmax(dim=-1, keepdim=True)
            step, minimum = ((largest - smallest) / 15).half().float(), smallest.half().float()
            # A group of equal weights has step 0: 0 / 0 is NaN, and its codes are 0.
            codes = ((groups - minimum) / step).nan_to_num(0.0).round().clamp_(0, 15).to(torch.uint8).flatten(1)
            linear.weight[start:stop] = codes[:, ::2] | (codes[:, 1::2] << 4)
            linear.step[start:stop], linear.minimum[start:stop] = step.squeeze(-1), minimum.squeeze(-1)
        return linear

    def dequantize_rows(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Return rows `start` to `stop` of W."""
        packed, step, minimum = self.weight[start:stop], self.step[start:stop], self.minimum[start:stop]
        groups = torch.stack((packed & 15, packed >> 4), dim=-1).view(*step.shape, -1).float()
        return groups.mul_(step.float().unsqueeze(-1)).add_(minimum.float().unsqueeze(-1)).flatten(1).to(dtype)
