"""A Linear over a weight that several tensors store, which is dequantized at each use: AWQ, GPTQ, FP8 and others."""

from collections.abc import Mapping

import torch
from torch import Tensor

from llamarium.quant.base import QuantizedLinear
from llamarium.quant.stored_types import STORED_TYPES


class LinearStored(QuantizedLinear):
    """A Linear over a weight of a type in `STORED_TYPES`, on any device.

    Attributes:
        type_name: A key of `STORED_TYPES`.
        weight: The codes, as the file has them; the type's other parts are buffers under their own names.
    """

    def __init__(self, type_name: str, shape: tuple[int, ...], weight: Tensor, parts: Mapping[str, Tensor]) -> None:
        """Take the parts of a weight (out_features, in_features) as they are; nothing is copied."""
        super().__init__(shape[1], shape[0])
        self.type_name = type_name
        self.register_buffer("weight", weight)
        for name, part in parts.items():
            self.register_buffer(name, part)

    def dequantize_rows(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Return rows `start` to `stop` of W."""
        parts = {name: buffer for name, buffer in self.named_buffers(recurse=False) if name != "weight"}
        shape = self.out_features, self.in_features
        values: Tensor = STORED_TYPES[self.type_name].decode(torch, {"data": self.weight, **parts}, shape, start, stop)
        return values.to(dtype)

    def extra_repr(self) -> str:
        """Return what `nn.Linear` shows, and the type."""
        return f"{super().extra_repr()}, type={self.type_name}"
