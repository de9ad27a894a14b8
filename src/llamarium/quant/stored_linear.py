"""A Linear for stored types of several tensors (AWQ, GPTQ, FP8, ...), dequantized at each use."""

from collections.abc import Mapping

import torch
from torch import Tensor

from llamarium.quant.base import QuantizedLinear
from llamarium.quant.stored_types import STORED_TYPES


class LinearStored(QuantizedLinear):
    """A Linear whose weight has a type in `STORED_TYPES`, on any device.

    Attributes:
        type_name: A key of `STORED_TYPES`.
        weight: Codes, as stored in the file. The type's other parts are buffers with the parts' names.
    """

    def __init__(self, type_name: str, shape: tuple[int, ...], weight: Tensor, parts: Mapping[str, Tensor]) -> None:
        """Use the parts of a weight (out_features, in_features) without copying them."""
        super().__init__(shape[1], shape[0])
        self.type_name = type_name
        self.register_buffer("weight", weight)
        for name, part in parts.items():
            self.register_buffer(name, part)

    def dequantize_rows(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Dequantize rows `start` to `stop` of W, (stop - start, in_features)."""
        parts = {name: buffer for name, buffer in self.named_buffers(recurse=False) if name != "weight"}
        shape = self.out_features, self.in_features
        values: Tensor = STORED_TYPES[self.type_name].decode(torch, {"data": self.weight, **parts}, shape, start, stop)
        return values.to(dtype)

    def extra_repr(self) -> str:
        """Return the same text as `nn.Linear`, and the type."""
        return f"{super().extra_repr()}, type={self.type_name}"
