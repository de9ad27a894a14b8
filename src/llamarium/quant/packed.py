"""Weights in the order in which a CPU uses them.

The formats below all keep a group of 32 consecutive weights of a row as small codes and one float16 scale:

| format       | a weight is               | bits | comes from                      |
|--------------|---------------------------|------|---------------------------------|
| q8           | scale * (q - 128)         | 8.5  | GGUF's Q8_0, `int8`             |
| q4           | scale * (q - 8)           | 4.5  | GGUF's Q4_0                     |
| q4_min       | scale * q + minimum       | 5    | GGUF's Q4_1, `int4`             |
| q4_codebook  | scale * levels[q]         | 4.5  | GGUF's IQ4_NL                   |

In a file the codes of a row lie together. A processor multiplies 16 rows at once, and memory is read fastest in one
straight line; so here a tile of 16 rows by 32 columns lies together, codes first and then the scales, and tiles follow
each other in the order in which they are multiplied:

    weight (stripes of 16 rows, groups of 32 columns, bytes of a tile)

    4 bits: byte (j, r, c) of (4, 16, 4) holds row r, column 4j + c in its low half, column 16 + 4j + c in the high one
    8 bits: byte (j, r, c) of (8, 16, 4) holds row r, column 4j + c

Nothing is lost in packing: codes and scales are the file's. What is rounded besides are the inputs: a group of 32
inputs becomes 8-bit codes and a scale, so that codes are multiplied with codes, in whole numbers, without an error.
That is `product_reference`; the kernels compute the same sums.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from llamarium.errors import OptionError
from llamarium.kernels import native
from llamarium.kernels.native import Kind
from llamarium.kernels.threads import one_torch_thread
from llamarium.quant.base import QuantizedEmbedding, QuantizedLinear
from llamarium.quant.ggml_blocks import IQ4_NL_VALUES
from llamarium.quant.int4 import LinearInt4
from llamarium.quant.int8 import Linear8bit

TILE_ROWS, GROUP = 16, 32
_HALF_EXPONENT = 0x7C00


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """One way to store a group.

    Attributes:
        name: What `info` shows.
        kind: The kernels' number for it.
        code_bytes: Bytes of a tile's codes.
        zero: The code that stands for 0.
        has_minimum: Whether a group has a minimum besides its scale.
        levels: What the 16 codes stand for, before the scale; None where they are evenly spaced.
    """

    name: str
    kind: Kind
    code_bytes: int
    zero: int
    has_minimum: bool = False
    levels: tuple[int, ...] | None = None

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile: its codes, 16 float16 scales, and 16 minima if there are any."""
        return self.code_bytes + 2 * TILE_ROWS * (1 + self.has_minimum)

    def values(self, codes: Tensor) -> Tensor:
        """Return what codes (uint8) stand for before the scale, float32."""
        if self.levels is None:
            return codes.float() - self.zero
        return torch.tensor(self.levels, dtype=torch.float32, device=codes.device)[codes.long()]


FORMATS = {
    item.name: item
    for item in (
        PackedFormat("q8", Kind.Q8, 512, 128),
        PackedFormat("q4", Kind.Q4, 256, 8),
        PackedFormat("q4_min", Kind.Q4_MIN, 256, 0, has_minimum=True),
        PackedFormat("q4_codebook", Kind.Q4_CODEBOOK, 256, 0, levels=IQ4_NL_VALUES),
    )
}
"""By name."""


class LinearPacked(QuantizedLinear):
    """A Linear over tiles.

    Attributes:
        format: How a group is stored.
        weight: uint8, (stripes, groups, tile_bytes); a last stripe that is not full has zero scales in the rest.
        uses_kernels: Whether products may round their inputs; else the weight is unpacked at each use.
    """

    def __init__(self, weight: Tensor, out_features: int, format: PackedFormat, *, uses_kernels: bool = True) -> None:
        """Take tiles as they are; nothing is copied."""
        super().__init__(weight.shape[1] * GROUP, out_features)
        self.format = format
        self.uses_kernels = uses_kernels
        self.register_buffer("weight", weight)

    @classmethod
    def from_codes(
        cls, codes: Tensor, scale: Tensor, format: PackedFormat, minimum: Tensor | None = None
    ) -> "LinearPacked":
        """Pack codes.

        Args:
            codes: uint8, (out, in); below 16 for the formats of 4 bits.
            scale: float16, (out, in / 32).
            format: What they mean.
            minimum: float16, (out, in / 32), if the format has one.

        Raises:
            OptionError: If `in` is no multiple of 32.
        """
        num_rows, num_columns = codes.shape
        if num_columns % GROUP:
            raise OptionError(f"rows of {num_columns} weights cannot be packed; expected a multiple of {GROUP}")
        assert (minimum is not None) == format.has_minimum
        stripes, groups = -(-num_rows // TILE_ROWS), num_columns // GROUP
        tiles = _fill(codes, stripes).view(stripes, TILE_ROWS, groups, GROUP // 4, 4).permute(0, 2, 3, 1, 4)
        if format.code_bytes == 256:
            tiles = tiles[:, :, :4] | (tiles[:, :, 4:] << 4)
        parts = [tiles.reshape(stripes, groups, format.code_bytes)]
        for halves in (scale, minimum):
            if halves is not None:
                by_tile = _fill(halves, stripes).view(stripes, TILE_ROWS, groups).transpose(1, 2).contiguous()
                parts.append(by_tile.view(torch.uint8))
        return cls(torch.cat(parts, dim=-1), num_rows, format)

    @property
    def matrix(self) -> native.Matrix:
        """This weight for the kernels, as long as it stays where it is."""
        return native.Matrix(
            self.format.kind, self.out_features, self.in_features, self.weight.data_ptr(), _codebook(self.format)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Multiply: (..., in_features) to (..., out_features), in x's dtype.

        With the C kernels inputs are rounded to 8 bits, as `product_reference` does. On other devices, without
        `uses_kernels`, and where a gradient is wanted, the weight is unpacked instead.
        """
        wants_grad = torch.is_grad_enabled() and x.requires_grad
        if wants_grad or not self.uses_kernels or x.device.type != "cpu" or native.library() is None:
            return super().forward(x)
        with one_torch_thread():
            rows = x.reshape(-1, self.in_features).float().contiguous()
            return native.product(self.matrix, rows).to(x.dtype).view(*x.shape[:-1], self.out_features)

    def parts(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the codes, scales and minima of some rows, by their numbers (n,), as `from_codes` took them."""
        stripe, row, code_bytes = rows // TILE_ROWS, rows % TILE_ROWS, self.format.code_bytes
        codes = self.weight[..., :code_bytes].unflatten(-1, (-1, TILE_ROWS, 4))[stripe, :, :, row]
        if code_bytes == 256:
            codes = torch.cat((codes & 15, codes >> 4), dim=2)
        halves = self.weight.view(torch.float16)[..., code_bytes // 2 :].unflatten(-1, (-1, TILE_ROWS))
        halves = halves[stripe, :, :, row]
        return codes.flatten(1), halves[..., 0], halves[..., 1] if self.format.has_minimum else None

    def dequantize_at(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return some rows of W, by their numbers (n,): (n, in_features)."""
        codes, scale, minimum = self.parts(rows)
        groups = self.format.values(codes).view(*scale.shape, GROUP) * scale.float().unsqueeze(-1)
        if minimum is not None:
            groups += minimum.float().unsqueeze(-1)
        return groups.flatten(1).to(dtype)

    def dequantize_rows(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Return rows `start` to `stop` of W."""
        return self.dequantize_at(torch.arange(start, stop, device=self.weight.device), dtype)

    def has_finite_scales(self) -> bool:
        """Whether no scale or minimum is NaN or infinite; codes always are finite."""
        # NaN and infinity have an exponent of ones; this takes a third of the time of torch's isfinite.
        halves = self.weight.view(torch.int16)[..., self.format.code_bytes // 2 :]
        return bool((halves & _HALF_EXPONENT).amax() < _HALF_EXPONENT)

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
        rows = ids.flatten()
        if ids.device.type != "cpu" or ids.dtype is not torch.int64 or native.library() is None:
            return self.linear.dequantize_at(rows, self.dtype).view(*ids.shape, self.embedding_dim)
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < self.num_embeddings:
            raise IndexError(f"ids span {int(rows.min())}..{int(rows.max())}; expected 0..{self.num_embeddings - 1}")
        return native.lookup(self.linear.matrix, rows.contiguous()).to(self.dtype).view(*ids.shape, self.embedding_dim)

    @property
    def linear(self) -> LinearPacked:
        """The same table as a Linear: a tied model's head."""
        if self._linear[0].weight is not self.weight:
            kernels = self._linear[0].uses_kernels
            self._linear[0] = LinearPacked(self.weight, self.num_embeddings, self.format, uses_kernels=kernels)
        return self._linear[0]

    def has_finite_scales(self) -> bool:
        """As `LinearPacked.has_finite_scales`."""
        return self.linear.has_finite_scales()

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the whole table: (num_embeddings, embedding_dim)."""
        return self.linear.dequantize(dtype)

    def extra_repr(self) -> str:
        """Return what `nn.Embedding` shows, and the format."""
        return f"{self.num_embeddings}, {self.embedding_dim}, type={self.format.name}"


# --- packing what files hold ------------------------------------------------------------------------------------------


def pack_ggml(weight: Tensor, type_name: str) -> LinearPacked:
    """Put GGUF's blocks of a format in `GGML_FORMATS` into tiles, without loss.

    Args:
        weight: uint8, (rows, bytes of a row).
        type_name: GGUF's name of the format.
    """
    format = FORMATS[GGML_FORMATS[type_name]]
    num_halves = 1 + format.has_minimum
    blocks = weight.view(len(weight), -1, 2 * num_halves + (32 if type_name == "Q8_0" else 16))
    halves = blocks[..., : 2 * num_halves].contiguous().view(torch.float16)
    codes = blocks[..., 2 * num_halves :]
    codes = codes ^ 128 if type_name == "Q8_0" else torch.cat((codes & 15, codes >> 4), dim=-1)
    minimum = halves[..., 1].contiguous() if format.has_minimum else None
    return LinearPacked.from_codes(codes.flatten(1), halves[..., 0].contiguous(), format, minimum)


def pack_integers(linear: Linear8bit | LinearInt4) -> LinearPacked | None:
    """Put the codes of a quantized Linear into tiles, without loss; None where its groups are not of 32."""
    rows, columns = linear.out_features, linear.in_features
    if columns % GROUP:
        return None
    if isinstance(linear, Linear8bit):
        codes = (linear.weight.view(torch.uint8) ^ 128).view(rows, columns)
        return LinearPacked.from_codes(codes, linear.scale, FORMATS["q8"])
    codes = torch.stack((linear.weight & 15, linear.weight >> 4), dim=-1).view(rows, columns)
    return LinearPacked.from_codes(codes, linear.step, FORMATS["q4_min"], linear.minimum)


GGML_FORMATS = {"Q8_0": "q8", "Q4_0": "q4", "Q4_1": "q4_min", "IQ4_NL": "q4_codebook"}
"""GGUF's formats that are packed without loss, and as what."""


def _fill(rows: Tensor, stripes: int) -> Tensor:
    """Add rows of zeros until the stripes are full."""
    missing = stripes * TILE_ROWS - len(rows)
    return rows if not missing else torch.cat((rows, rows.new_zeros(missing, rows.shape[1])))


_codebooks: dict[str, Tensor] = {}


def _codebook(format: PackedFormat) -> int | None:
    """Return the address of a format's levels plus 128, which stay where they are."""
    if format.levels is None:
        return None
    if format.name not in _codebooks:
        _codebooks[format.name] = torch.tensor([level + 128 for level in format.levels], dtype=torch.uint8)
    return _codebooks[format.name].data_ptr()


# --- the definition of the product ------------------------------------------------------------------------------------


def quantize_inputs(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round groups of 32 inputs to 8 bits: x (M, in) to codes int8 (M, groups, 32) and scales float32 (M, groups)."""
    groups = x.float().view(len(x), -1, GROUP)
    largest = groups.abs().amax(dim=-1, keepdim=True)
    inverse = torch.where(largest > 0, torch.tensor(127.0) / largest, 0.0)  # a number / tensor would round twice
    return (groups * inverse).round().clamp(-127, 127).to(torch.int8), (largest / 127).squeeze(-1)


def product_reference(x: Tensor, linear: LinearPacked) -> Tensor:
    """Multiply as the kernels do: x (M, in) to (M, out), float32; slow, and short enough to read."""
    codes, scale_MG = quantize_inputs(x)
    weights, scale_OG, minimum_OG = linear.parts(torch.arange(linear.out_features))
    values = linear.format.values(weights).view(*scale_OG.shape, GROUP)
    sums_MOG = torch.einsum("mgc,ogc->mog", codes.double(), values.double()).float()  # whole numbers, without an error
    y_MO = (sums_MOG * (scale_OG.float() * scale_MG.unsqueeze(1))).sum(-1)
    if minimum_OG is not None:
        y_MO += (codes.float().sum(-1) * scale_MG) @ minimum_OG.float().T
    return y_MO
