"""Weights in the order in which a CPU uses them.

The types are those of `PACKED_FORMATS` (`quant/formats.py`), under GGUF's names. In Q8_0, Q4_0, Q4_1 and IQ4_NL 32
consecutive weights of a row share a float16 scale. In the K types 256 share one, and 32 or 16 of them an integer that
it is multiplied with. `native/tiles.h` says where what lies in a tile.

Nothing is lost in packing: codes and scales are the file's. What is rounded besides are the inputs: a group of 32
inputs becomes codes and a scale, so that codes are multiplied with codes, in whole numbers. Codes have 8 bits, those of
the four inputs that the largest is among 16 (`round_inputs` in `codes.py`). With `input_bits` of 16, what those codes
leave out is rounded once more, with a scale of its own, and multiplied too. That is `product_reference` there; the
kernels compute the same sums.
"""

import torch
from torch import Tensor

from llamarium.kernels import native
from llamarium.kernels.input_bits import INPUT_BITS, InputBits
from llamarium.kernels.threads import one_torch_thread
from llamarium.quant.base import QuantizedEmbedding, QuantizedLinear
from llamarium.quant.codes import levels_of, parts_of_rows
from llamarium.quant.formats import PackedFormat
from llamarium.quant.packing import matrix_of


class LinearPacked(QuantizedLinear):
    """A Linear over tiles.

    Attributes:
        format: How a tile is stored.
        weight: uint8, (panels, tiles, tile_bytes); a last panel that is not full has zero scales in the rest.
        uses_kernels: Whether products may round their inputs; else the weight is unpacked at each use.
        input_bits: What they round them to.
    """

    input_bits: InputBits = INPUT_BITS

    def __init__(self, weight: Tensor, out_features: int, format: PackedFormat, *, uses_kernels: bool = True) -> None:
        """Take tiles as they are; nothing is copied."""
        super().__init__(weight.shape[1] * format.columns, out_features)
        self.format, self.type_name = format, format.name
        self.uses_kernels = uses_kernels
        self.register_buffer("weight", weight)

    @property
    def matrix(self) -> native.CMatrix:
        """This weight for the kernels, as long as it stays where it is."""
        return matrix_of(self.format.name, (self.out_features, self.in_features), self.weight.data_ptr())

    def forward(self, x: Tensor) -> Tensor:
        """Multiply: (..., in_features) to (..., out_features), in x's dtype.

        With the C kernels inputs are rounded to `input_bits`. On other devices, without `uses_kernels`, and where a
        gradient is wanted, the weight is unpacked instead.
        """
        wants_grad = torch.is_grad_enabled() and x.requires_grad
        is_here = x.device.type == self.weight.device.type == "cpu"
        if wants_grad or not self.uses_kernels or not is_here or native.library() is None:
            return super().forward(x)
        with one_torch_thread():
            rows = x.detach().reshape(-1, self.in_features).float().contiguous()
            y = torch.from_numpy(native.product(self.matrix, rows.numpy(), self.input_bits))
            y = y if self.bias is None else y + self.bias.float()
            return y.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def dequantize_at(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return some rows of W, by their numbers (n,): (n, in_features). C and PyTorch give the same bits."""
        is_here = rows.device.type == self.weight.device.type == "cpu"
        if is_here and rows.dtype is torch.int64 and native.library() is not None:
            return torch.from_numpy(native.lookup(self.matrix, rows.contiguous().numpy())).to(dtype)
        codes, scale, minimum = parts_of_rows(torch, self.weight, rows, self.format)
        levels = torch.tensor(levels_of(self.format), dtype=torch.float32, device=codes.device)
        groups = levels.index_select(0, codes.flatten().int()).view(*scale.shape, -1) * scale.unsqueeze(-1)
        if minimum is not None:
            groups += minimum.unsqueeze(-1)
        return groups.flatten(1).to(dtype)

    def dequantize_rows(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Return rows `start` to `stop` of W."""
        return self.dequantize_at(torch.arange(start, stop, device=self.weight.device), dtype)

    def extra_repr(self) -> str:
        """Return what `nn.Linear` shows, and the format."""
        return f"{super().extra_repr()}, type={self.type_name}"


class EmbeddingPacked(QuantizedEmbedding):
    """An embedding over tiles: those of its head, or its own. Only rows that are looked up are unpacked.

    Its weight is as `LinearPacked`'s; a tied model's is the same tensor.
    """

    def __init__(self, linear: LinearPacked, dtype: torch.dtype) -> None:
        shape = linear.out_features, linear.in_features
        super().__init__(linear.weight, shape, linear.type_name, dtype)
        self.format = linear.format
        self._linear = [linear]  # a list, as it is no part of this module

    def forward(self, ids: Tensor) -> Tensor:
        """Look up integer ids (...): vectors (..., embedding_dim)."""
        return self.linear.dequantize_at(ids.flatten(), self.dtype).view(*ids.shape, self.embedding_dim)

    @property
    def linear(self) -> LinearPacked:
        """The same table as a Linear: a tied model's head."""
        if self._linear[0].weight is not self.weight:
            kernels = self._linear[0].uses_kernels
            input_bits = self._linear[0].input_bits
            self._linear[0] = LinearPacked(self.weight, self.num_embeddings, self.format, uses_kernels=kernels)
            self._linear[0].input_bits = input_bits
        return self._linear[0]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the whole table: (num_embeddings, embedding_dim)."""
        return self.linear.dequantize(dtype)
