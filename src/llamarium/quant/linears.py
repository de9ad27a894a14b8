"""The Linears that quantizing a model while it is loaded makes: of integers in groups, and NF4's.

32 consecutive weights of a row form a group, whose scale and minimum are float16.

- Q8_0: a group's largest magnitude becomes 127 and everything else is rounded to the grid that this makes: `w = q *
  scale`. Zero stays zero, and a weight is off by at most half a step, `scale / 2`. 8.5 bits a weight, as GGUF's Q8_0:
  hardly distinguishable from bf16. Rows that are no multiple of 32 use the largest power of two that divides them.
- Q4_1: sixteen levels from a group's smallest weight to its largest: `w = minimum + q * step`. The grid is asymmetric,
  since few groups are centred on zero; half a step is the most that is lost. 5 bits a weight, as GGUF's Q4_1. Rows that
  are no multiple of 32 use groups of 16.

To both errors comes what is rounded of the float16 numbers. What a machine likes better is packed from the codes at
load, without loss (`packed.py`).

Source: Jacob et al., "Quantization and Training of Neural Networks" (2018), section 2, symmetric; the grid of GPTQ and
AWQ checkpoints (Frantar et al., 2022; Lin et al., 2023), rounded to nearest; the groups and float16 scales of ggml.
"""

from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from llamarium.quant.base import QuantizedLinear
from llamarium.quant.codes import group_codes
from llamarium.quant.formats import Method, group_size
from llamarium.quant.nf4 import Linear4bit


class LinearIntegers(QuantizedLinear):
    """A Linear over integers in groups.

    Attributes:
        scale: float16, (out_features, groups): the step between levels.
        minimum: Alike, or None.
    """

    scale: Tensor
    minimum: Tensor | None

    type_name: ClassVar[Literal["Q8_0", "Q4_1"]]

    def __init__(self, in_features: int, out_features: int, *, device: torch.device | str | None = None) -> None:
        """Make room for a weight without filling it; `from_weight` fills."""
        super().__init__(in_features, out_features)
        shape = (out_features, in_features // group_size(in_features, self.type_name))
        self.register_buffer("scale", torch.empty(shape, dtype=torch.float16, device=device))
        has_minimum = self.type_name == "Q4_1"
        self.register_buffer("minimum", torch.empty_like(self.scale) if has_minimum else None)
        columns, dtype = (in_features // 2, torch.uint8) if has_minimum else (in_features, torch.int8)
        self.register_buffer("weight", torch.empty(out_features, columns, dtype=dtype, device=device))

    @classmethod
    def from_weight(cls, weight: Tensor) -> Self:
        """Quantize (out_features, in_features). A group with NaN or an infinity comes back as NaN, or infinite."""
        linear = cls(weight.shape[1], weight.shape[0], device=weight.device)
        for start, stop in linear.chunks():
            groups = weight[start:stop].detach().float().view(stop - start, linear.scale.shape[1], -1)
            codes, scale, minimum = group_codes(torch, groups, cls.type_name)
            linear.weight[start:stop], linear.scale[start:stop] = cls.stored(codes.flatten(1)), scale.squeeze(-1)
            if linear.minimum is not None:
                linear.minimum[start:stop] = minimum.squeeze(-1)
        return linear

    @staticmethod
    def stored(codes: Tensor) -> Tensor:
        """Return codes, (rows, in_features) whole numbers, as `weight` holds them."""
        return codes

    def codes(self, rows: slice = slice(None)) -> Tensor:
        """Return the codes of some rows: (rows, in_features)."""
        return self.weight[rows]

    def dequantize_rows(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Return rows `start` to `stop` of W."""
        rows = slice(start, stop)
        groups = self.codes(rows).float().view(stop - start, self.scale.shape[1], -1)
        groups.mul_(self.scale[rows].float().unsqueeze(-1))
        if self.minimum is not None:
            groups.add_(self.minimum[rows].float().unsqueeze(-1))
        return groups.flatten(1).to(dtype)


class Linear8bit(LinearIntegers):
    """A Linear over int8 codes from -127 to 127: (out_features, in_features)."""

    type_name = "Q8_0"


class LinearInt4(LinearIntegers):
    """A Linear over codes from 0 to 15: uint8 (out_features, in_features / 2), the first of two in the low half."""

    type_name = "Q4_1"

    @staticmethod
    def stored(codes: Tensor) -> Tensor:
        """See `LinearIntegers.stored`."""
        codes = codes.to(torch.uint8)
        return codes[:, ::2] | (codes[:, 1::2] << 4)

    def codes(self, rows: slice = slice(None)) -> Tensor:
        """See `LinearIntegers.codes`."""
        packed = self.weight[rows]
        return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)


QUANTIZED_LINEARS: dict[Method, type[Linear4bit] | type[Linear8bit] | type[LinearInt4]] = {
    "NF4": Linear4bit,
    "Q8_0": Linear8bit,
    "Q4_1": LinearInt4,
}
