"""Weights in the order in which a CPU uses them.

The types are those of `PACKED_FORMATS` (`quant/formats.py`), under GGUF's names. In Q8_0, Q4_0, Q4_1 and IQ4_NL 32
consecutive weights of a row share a float16 scale. In the K types 256 share one, and 32 or 16 of them an integer that
it is multiplied with. `native/tiles.h` says where what lies in a tile.

Nothing is lost in packing: codes and scales are the file's. What is rounded besides are the inputs: a group of 32
inputs becomes codes and a scale, so that codes are multiplied with codes, in whole numbers. Codes have 8 bits, those of
the four inputs that the largest is among 16 (`quantize_inputs`). With `input_bits` of 16, what those codes leave out is
rounded once more, with a scale of its own, and multiplied too. That is `product_reference`; the kernels compute the
same sums.
"""

import math

import torch
from torch import Tensor

from llamarium.kernels import native
from llamarium.kernels.native import INPUT_BITS, InputBits
from llamarium.kernels.threads import one_torch_thread
from llamarium.quant.base import QuantizedEmbedding, QuantizedLinear
from llamarium.quant.formats import GROUP, PACKED_FORMATS, PackedFormat
from llamarium.quant.int4 import LinearInt4
from llamarium.quant.int8 import Linear8bit
from llamarium.quant.packing import matrix_of, pack_blocks, pack_groups
from llamarium.quant.tiles import halves_of, unpack_rows, values_of

__all__ = [
    "EmbeddingPacked",
    "LinearPacked",
    "pack_ggml",
    "pack_integers",
    "product_reference",
    "quantize_inputs",
]

_HALF_EXPONENT = 0x7C00


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
        self.format = format
        self.uses_kernels = uses_kernels
        self.register_buffer("weight", weight)

    @property
    def matrix(self) -> native.Matrix:
        """This weight for the kernels, as long as it stays where it is."""
        return matrix_of(self.format.name, (self.out_features, self.in_features), self.weight.data_ptr())

    def forward(self, x: Tensor) -> Tensor:
        """Multiply: (..., in_features) to (..., out_features), in x's dtype.

        With the C kernels inputs are rounded to `input_bits`, as `product_reference` does. On other devices, without
        `uses_kernels`, and where a gradient is wanted, the weight is unpacked instead.
        """
        wants_grad = torch.is_grad_enabled() and x.requires_grad
        is_here = x.device.type == self.weight.device.type == "cpu"
        if wants_grad or not self.uses_kernels or not is_here or native.library() is None:
            return super().forward(x)
        with one_torch_thread():
            rows = x.detach().reshape(-1, self.in_features).float().contiguous()
            y = torch.from_numpy(native.product(self.matrix, rows.numpy(), self.input_bits))
            return y.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def parts(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the codes, scales and minima of some rows, by their numbers (n,), as `unpack_rows` does."""
        return unpack_rows(self.weight, rows, self.format)

    def dequantize_at(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return some rows of W, by their numbers (n,): (n, in_features). C and PyTorch give the same bits."""
        is_here = rows.device.type == self.weight.device.type == "cpu"
        if is_here and rows.dtype is torch.int64 and native.library() is not None:
            return torch.from_numpy(native.lookup(self.matrix, rows.contiguous().numpy())).to(dtype)
        codes, scale, minimum = self.parts(rows)
        groups = values_of(codes, self.format).view(*scale.shape, -1) * scale.unsqueeze(-1)
        if minimum is not None:
            groups += minimum.unsqueeze(-1)
        return groups.flatten(1).to(dtype)

    def dequantize_rows(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Return rows `start` to `stop` of W."""
        return self.dequantize_at(torch.arange(start, stop, device=self.weight.device), dtype)

    def has_finite_scales(self) -> bool:
        """Whether no scale or minimum is NaN or infinite; codes always are finite."""
        # NaN and infinity have an exponent of ones; this takes a third of the time of torch's isfinite.
        halves = halves_of(self.weight, self.format).view(torch.int16)
        return bool((halves & _HALF_EXPONENT).amax() < _HALF_EXPONENT)

    @property
    def type_name(self) -> str:
        """The type's name."""
        return self.format.name

    def extra_repr(self) -> str:
        """Return what `nn.Linear` shows, and the format."""
        return f"{super().extra_repr()}, type={self.format.name}"


class EmbeddingPacked(QuantizedEmbedding):
    """An embedding over tiles: those of its head, or its own. Only rows that are looked up are unpacked.

    Attributes:
        weight: As `LinearPacked`'s; a tied model's is the same tensor.
        dtype: Of the vectors that come out.
    """

    weight: Tensor

    def __init__(self, linear: LinearPacked, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = linear.out_features, linear.in_features
        self.format, self.dtype = linear.format, dtype
        self.register_buffer("weight", linear.weight)
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

    def has_finite_scales(self) -> bool:
        """As `LinearPacked.has_finite_scales`."""
        return self.linear.has_finite_scales()

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the whole table: (num_embeddings, embedding_dim)."""
        return self.linear.dequantize(dtype)

    @property
    def type_name(self) -> str:
        """The type's name."""
        return self.format.name

    def extra_repr(self) -> str:
        """Return what `nn.Embedding` shows, and the format."""
        return f"{self.num_embeddings}, {self.embedding_dim}, type={self.format.name}"


# --- packing what files hold ------------------------------------------------------------------------------------------


def pack_ggml(weight: Tensor, type_name: str) -> LinearPacked:
    """Put GGUF's blocks, uint8 (rows, bytes of a row), of a type in `PACKED_FORMATS` into tiles, without loss."""
    format = PACKED_FORMATS[type_name]
    tiles = pack_blocks(weight.numpy(), format.num_columns(weight.shape[1]), format)
    return LinearPacked(torch.from_numpy(tiles), len(weight), format)


def pack_integers(linear: Linear8bit | LinearInt4) -> LinearPacked | None:
    """Put the codes of a quantized Linear into tiles, without loss; None where its groups are not of 32."""
    rows, columns = linear.out_features, linear.in_features
    if columns % GROUP:
        return None
    if isinstance(linear, Linear8bit):
        codes, minimum, scale = linear.weight.view(torch.uint8) ^ 128, None, linear.scale
    else:
        codes = torch.stack((linear.weight & 15, linear.weight >> 4), dim=-1)
        minimum, scale = linear.minimum.numpy(), linear.step
    format = PACKED_FORMATS[linear.type_name]
    tiles = pack_groups((codes.view(rows, columns).numpy(), scale.numpy(), minimum), format)
    return LinearPacked(torch.from_numpy(tiles), rows, format)


# --- the definition of the product ------------------------------------------------------------------------------------


_MOST_OUTLIER_CODE = 127.0 + 256 * 127
_LEAST_SCALE, _MOST_SCALE = 2.0**-100, 2.0**110  # with any weight's scale the product is neither subnormal nor infinite
_BELOW_EIGHTHS = 2**20 - 1  # the bits of a float's mantissa but for the upper three


def quantize_inputs(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round groups of 32 inputs to 8 bits, and their outliers to 16 (docs/decisions/0022).

    A group's outlier are the four inputs, 4 j to 4 j + 3, that the largest one is among. The scale is such that all
    others have codes up to 127, and has three bits of mantissa: 1, 1.125, 1.25, ... times a power of two. NaN and
    infinities make it NaN, and so do inputs from which nothing finite would come.

    Args:
        x: (M, in).

    Returns:
        codes: int16, (M, groups, 32).
        scales: float32, (M, groups); x is nearly codes * scales.
    """
    fours = x.float().view(len(x), -1, GROUP // 4, 4)
    sizes = fours.abs().amax(dim=-1)
    # As the kernels find them: sizes are compared but for their last three bits, and of equal fours the first is taken.
    keys = (sizes.contiguous().view(torch.int32) & ~7) | torch.arange(7, -1, -1, dtype=torch.int32)
    key = keys.amax(dim=-1, keepdim=True)
    is_outlier = keys == key
    largest = (key & ~7).view(torch.float32)
    others = (keys.masked_fill(is_outlier, 0).amax(dim=-1, keepdim=True) & ~7).view(torch.float32)
    needed = torch.maximum(largest / _MOST_OUTLIER_CODE, others / 127)
    bits = needed.clamp(min=_LEAST_SCALE).view(torch.int32)
    scale = ((bits + _BELOW_EIGHTHS) & ~_BELOW_EIGHTHS).view(torch.float32)
    scale = scale.masked_fill(~(needed <= _MOST_SCALE), math.nan)
    inverse = 1 / scale
    codes = (fours * inverse.unsqueeze(-1)).round().nan_to_num(0, 0, 0)
    codes += is_outlier.unsqueeze(-1) & (codes.remainder(256) == 128)  # so that no low byte is -128
    return codes.to(torch.int16).flatten(-2), scale.squeeze(-1)


def product_reference(x: Tensor, linear: LinearPacked) -> Tensor:
    """Multiply as the kernels do: x (M, in) to (M, out), float32; slow, and short enough to read."""
    codes, scale_MG = quantize_inputs(x)
    y_MO = _product_of_codes(codes, scale_MG, linear)
    if linear.input_bits == 16:
        residual = x.float() - (codes * scale_MG.unsqueeze(-1)).flatten(1)
        y_MO += _product_of_codes(*quantize_inputs(residual), linear)
    return y_MO


def _product_of_codes(codes: Tensor, scale_MG: Tensor, linear: LinearPacked) -> Tensor:
    weights, scale_OG, minimum_OG = linear.parts(torch.arange(linear.out_features))
    values = values_of(weights, linear.format).view(*scale_OG.shape, -1)  # 32 or 16 columns share a scale
    codes = codes.view(len(codes), scale_OG.shape[1], -1)
    scale_MG = scale_MG.repeat_interleave(scale_OG.shape[1] // scale_MG.shape[1], dim=1)
    sums_MOG = torch.einsum("mgc,ogc->mog", codes.double(), values.double()).float()  # whole numbers, rounded once
    y_MO = (sums_MOG * (scale_OG * scale_MG.unsqueeze(1))).sum(-1)
    if minimum_OG is not None:
        y_MO += (codes.float().sum(-1) * scale_MG) @ minimum_OG.T
    return y_MO
