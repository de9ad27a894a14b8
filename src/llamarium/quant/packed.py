"""Linears and embeddings with packed weights, stored in tiles for the C kernels.

The types are those of `PACKED_FORMATS` (`quant/formats.py`), with GGUF's names. In types with blocks of 32, such as
Q8_0 and Q4_0, 32 consecutive weights of a row share a float16 scale. In the K types 256 weights share one, and each
sub-block of 32 or 16 multiplies it by an integer. `native/tiles.h` defines the layout of a tile.

Packing is lossless: codes and scales are those of the file. The kernels also quantize the inputs: a group of 32 inputs
becomes codes and a scale, so that products are integer. Codes have 8 bits, and 16 bits for the four inputs that
include the largest (`round_inputs` in `codes.py`). With `input_bits` of 16 the rounding error of the inputs is
quantized the same way, with another scale, and its product is added. `product_reference` in `codes.py` defines the
result; the kernels compute the same sums.
"""

import torch
from torch import Tensor

from llamarium.kernels import native, structs
from llamarium.kernels.input_bits import INPUT_BITS, InputBits
from llamarium.kernels.threads import one_torch_thread
from llamarium.quant.base import QuantizedEmbedding, QuantizedLinear
from llamarium.quant.codes import levels_of, parts_of_rows
from llamarium.quant.formats import PackedFormat
from llamarium.quant.packing import matrix_of


class LinearPacked(QuantizedLinear):
    """A Linear whose weight is in tiles.

    Attributes:
        format: Type and layout of the tiles.
        weight: uint8 (panels, tiles, tile_bytes); unused rows of the last panel have scale zero.
        uses_kernels: Multiply with the C kernels, which quantize inputs; False dequantizes the weight at each use.
        input_bits: Number of bits that inputs are quantized to.
    """

    input_bits: InputBits = INPUT_BITS

    def __init__(self, weight: Tensor, out_features: int, format: PackedFormat, *, uses_kernels: bool = True) -> None:
        """Use tiles without copying them."""
        super().__init__(weight.shape[1] * format.columns, out_features)
        self.format, self.type_name = format, format.name
        self.uses_kernels = uses_kernels
        self.register_buffer("weight", weight)

    @property
    def matrix(self) -> structs.CMatrix:
        """A descriptor of the weight for the kernels, valid until the tensor's storage moves."""
        return matrix_of(self.format.name, (self.out_features, self.in_features), self.weight.data_ptr())

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b: (..., in_features) to (..., out_features), in x's dtype.

        The C kernels quantize inputs to `input_bits`. On other devices than the CPU, without `uses_kernels`, and if a
        gradient is needed, the weight is dequantized instead and inputs are exact.
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
        """Dequantize rows of W, by their indices (n,), to (n, in_features). C and PyTorch return the same bits."""
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
        """Dequantize rows `start` to `stop` of W, (stop - start, in_features)."""
        return self.dequantize_at(torch.arange(start, stop, device=self.weight.device), dtype)

    def extra_repr(self) -> str:
        """Return the same text as `nn.Linear`, and the type."""
        return f"{super().extra_repr()}, type={self.type_name}"


class EmbeddingPacked(QuantizedEmbedding):
    """An embedding whose table is in tiles; only the rows that are looked up are dequantized.

    The weight has the layout of `LinearPacked`'s, and is shared with the head of a tied model.
    """

    def __init__(self, linear: LinearPacked, dtype: torch.dtype) -> None:
        shape = linear.out_features, linear.in_features
        super().__init__(linear.weight, shape, linear.type_name, dtype)
        self.format = linear.format
        self._linear = [linear]  # in a list, so that torch does not register it as a submodule

    def forward(self, ids: Tensor) -> Tensor:
        """Return the vectors (..., embedding_dim) of integer ids (...)."""
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
        """Dequantize the whole table, (num_embeddings, embedding_dim)."""
        return self.linear.dequantize(dtype)
