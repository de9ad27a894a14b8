"""NF4: four bits per weight, with levels at the quantiles of a normal distribution.

Trained weights are close to normally distributed. NF4's sixteen levels are quantiles of that distribution, so that
each level is used about equally often. 64 consecutive weights of the flattened matrix form a block. The largest
magnitude in the block, its `absmax`, scales the levels. Two codes share a byte, the first in the high half.

One float32 absmax per 64 weights takes half a bit per weight. *Double quantization* quantizes the absmax values too:
their mean is subtracted, blocks of 256 are scaled by their largest magnitude, and each value becomes one of 256 levels
of a "dynamic" map, which is dense near zero. This reduces the cost to an eighth of a bit per weight.

The error of a weight is at most half the widest gap between levels, 0.152 times the block's absmax, and much less on
average. Double quantization adds at most the error of the absmax, 0.8 % of the largest deviation from the mean.

Codes, absmax and nested absmax are byte-identical to those of bitsandbytes on the CPU.

Source: Dettmers et al., "QLoRA" (2023), section 3; bitsandbytes, `backends/default/ops.py`, `quantize_4bit`;
`csrc/cpu_ops.cpp` for the nested scales; `functional.py`, `create_dynamic_map`.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llamarium.quant.base import QuantizedLinear
from llamarium.quant.codes import nf4_blocks, nf4_scales
from llamarium.quant.nf4_state import LEVELS, NESTED_BLOCK_SIZE, STATE_KEY, Component, NF4Layout, check_components

NF4_LEVELS = torch.tensor(LEVELS)
"""Normal-distribution quantiles, scaled to [-1, 1], with an exact zero."""

# Entry b has the levels of the high and the low half of byte b; both are looked up at once, as one 8-byte number.
_LEVEL_PAIRS = torch.cartesian_prod(NF4_LEVELS, NF4_LEVELS)

# Weights quantized at a time; bounds the size of float32 copies.
_PIECE_WEIGHTS = 2**20


class Nested(NamedTuple):
    """The second quantization of a double-quantized tensor.

    Attributes:
        absmax: float32, one per 256 absmax values.
        quant_map: Levels, float32 (256,).
        offset: Mean of the absmax values, float32 ().
    """

    absmax: Tensor
    quant_map: Tensor
    offset: Tensor


class NF4(NamedTuple):
    """A tensor in NF4.

    Attributes:
        codes: uint8, (ceil(weights / 2), 1).
        absmax: One per block: float32, or uint8 indices into `nested.quant_map`.
        nested: The quantization of `absmax`; None without double quantization.
    """

    codes: Tensor
    absmax: Tensor
    nested: Nested | None


def quantize_nf4(weight: Tensor, *, double_quant: bool = True, block_size: int = 64) -> NF4:
    """Quantize a float tensor of any shape, flattened.

    A block with NaN or infinity dequantizes to NaN.
    """
    flat = weight.detach().flatten()
    blocks = (nf4_blocks(torch, piece.float(), block_size) for piece in flat.split(_PIECE_WEIGHTS))
    pieces = [(_in_pairs(codes), absmax) for codes, absmax in blocks]
    packed = torch.cat([codes for codes, _ in pieces]).unsqueeze(1)
    absmax = torch.cat([absmax for _, absmax in pieces])
    if not double_quant:
        return NF4(packed, absmax, None)
    places, nested_absmax, levels, offset = nf4_scales(torch, absmax)
    return NF4(packed, places, Nested(nested_absmax, levels, offset))


def nf4_parts(values: NDArray[Any]) -> tuple[NDArray[np.uint8], dict[str, NDArray[Any]]]:
    """Quantize a weight to the components of a bitsandbytes checkpoint.

    Double quantization is used, except if a scale is NaN or infinite: the mean would make the whole weight NaN.

    Args:
        values: float32, float16, or the bits of bfloat16 as uint16, (out, in).

    Returns:
        The codes, and the other components by name without the prefix `weight.`.
    """
    weight = torch.from_numpy(values)
    weight = weight.view(torch.bfloat16) if values.dtype == np.uint16 else weight
    codes, absmax, nested = quantize_nf4(weight)
    if nested is not None and not nested.offset.isfinite():
        codes, absmax, nested = quantize_nf4(weight, double_quant=False)

    dtype = str(weight.dtype).removeprefix("torch.")
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": dtype, "shape": list(values.shape)}
    parts = {"absmax": absmax.numpy(), "quant_map": NF4_LEVELS.numpy()}
    if nested is not None:
        offset = float(nested.offset)
        state |= {"nested_blocksize": NESTED_BLOCK_SIZE, "nested_dtype": "float32", "nested_offset": offset}
        parts |= {"nested_absmax": nested.absmax.numpy(), "nested_quant_map": nested.quant_map.numpy()}
    parts[STATE_KEY.removeprefix("weight.")] = np.array(bytearray(json.dumps(state).encode()))
    return codes.numpy(), parts


def _in_pairs(codes: Tensor) -> Tensor:
    if len(codes) % 2:
        codes = torch.cat((codes, codes.new_tensor([7])))  # 7 is the code of zero
    return (codes[::2] << 4) | codes[1::2]


def dequantize_range(quantized: NF4, start: int, stop: int, block_size: int) -> Tensor:
    """Dequantize weights `start` to `stop` of the flattened tensor, float32, via the blocks that contain them."""
    first, last = start // block_size, -(-stop // block_size)
    begin, end = first * block_size, last * block_size  # a slice past the end is fine: the last block may be short
    pairs = _LEVEL_PAIRS.to(quantized.codes.device).view(torch.int64).flatten()
    packed = quantized.codes.flatten()[begin // 2 : end // 2]
    # index_select with int32 is several times faster than pairs[packed].
    values = pairs.index_select(0, packed.int()).view(torch.float32)
    _scale_blocks(values, _dequantize_scales(quantized, first, last), block_size)
    return values[start - begin : stop - begin]


def _dequantize_scales(quantized: NF4, start: int, stop: int) -> Tensor:
    """Dequantize absmax values `start` to `stop`, float32."""
    nested = quantized.nested
    if nested is None:
        return quantized.absmax[start:stop]
    first, last = start // NESTED_BLOCK_SIZE, -(-stop // NESTED_BLOCK_SIZE)
    begin, end = first * NESTED_BLOCK_SIZE, last * NESTED_BLOCK_SIZE
    values = nested.quant_map.index_select(0, quantized.absmax[begin:end].int())
    _scale_blocks(values, nested.absmax[first:last], NESTED_BLOCK_SIZE)
    return values.add_(nested.offset)[start - begin : stop - begin]


def _scale_blocks(values: Tensor, scales: Tensor, block_size: int) -> None:
    """Multiply each block of (n,) values by its scale in place; the last block may be short."""
    num_whole = len(values) // block_size
    values[: num_whole * block_size].view(-1, block_size).mul_(scales[:num_whole].unsqueeze(-1))
    values[num_whole * block_size :].mul_(scales[num_whole:])


_TYPE_NAMES = {torch.uint8: "U8", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def _component(values: Tensor) -> Component:
    name = _TYPE_NAMES.get(values.dtype, str(values.dtype))
    array = values.detach().cpu()  # sync: only while a checkpoint is loaded
    return Component(name, (array.view(torch.uint8) if name == "BF16" else array).numpy())


_NESTED_BUFFERS = ("nested_absmax", "nested_quant_map", "nested_offset")


class Linear4bit(QuantizedLinear):
    """A Linear with an NF4 weight, with the same class name and bytes as in bitsandbytes.

    Attributes:
        weight: Codes, uint8 (ceil(out_features * in_features / 2), 1), two per byte.
        absmax: One per block: float32, or uint8 with double quantization.
        nested_absmax, nested_quant_map, nested_offset: Quantization of the scales; None without double quantization.
        layout: Logical shape, dtype before quantization, and block sizes.
    """

    absmax: Tensor
    nested_absmax: Tensor | None
    nested_quant_map: Tensor | None
    nested_offset: Tensor | None

    type_name: str = "NF4"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        double_quant: bool = True,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        """Allocate buffers without initializing them; see `from_weight` and `from_state`."""
        super().__init__(in_features, out_features)
        self.layout = NF4Layout(
            (out_features, in_features), str(dtype).removeprefix("torch."), double_quant=double_quant
        )
        num_bytes, num_blocks = -(-self.layout.num_weights // 2), self.layout.num_blocks
        scale_dtype = torch.uint8 if double_quant else torch.float32
        self.register_buffer("weight", torch.empty(num_bytes, 1, dtype=torch.uint8, device=device))
        self.register_buffer("absmax", torch.empty(num_blocks, dtype=scale_dtype, device=device))
        for name, size in zip(_NESTED_BUFFERS, ((self.layout.num_nested_blocks,), (256,), ()), strict=True):
            self.register_buffer(name, torch.empty(size, device=device) if double_quant else None)

    @classmethod
    def from_weight(cls, weight: Tensor, *, double_quant: bool = True) -> "Linear4bit":
        """Quantize a weight (out_features, in_features) of any float dtype."""
        rows, columns = weight.shape
        linear = cls(columns, rows, double_quant=double_quant, dtype=weight.dtype, device="meta")
        linear._hold(quantize_nf4(weight, double_quant=double_quant))
        return linear

    @classmethod
    def from_state(cls, components: Mapping[str, Tensor], source: str) -> "Linear4bit":
        """Build a Linear from the components of a bitsandbytes weight (see `nf4_state`), without copying.

        Args:
            components: Tensors by name: `weight`, `weight.absmax`, ...
            source: File and weight, for messages.
        """
        layout = check_components({name: _component(part) for name, part in components.items()}, source)
        nested = None
        if layout.nested_offset is not None:
            absmax, quant_map = components["weight.nested_absmax"], components["weight.nested_quant_map"]
            nested = Nested(absmax.flatten(), quant_map.flatten(), absmax.new_tensor(layout.nested_offset))
        linear = cls(layout.shape[1], layout.shape[0], device="meta")
        linear.layout = layout
        codes = components["weight"].contiguous().view(torch.uint8).reshape(-1, 1)  # in any `bnb_4bit_quant_storage`
        linear._hold(NF4(codes, components["weight.absmax"].flatten(), nested))
        return linear

    def _hold(self, quantized: NF4) -> None:
        self.weight, self.absmax = quantized.codes, quantized.absmax
        for name, tensor in zip(_NESTED_BUFFERS, quantized.nested or (None, None, None), strict=True):
            setattr(self, name, tensor)

    def _quantized(self) -> NF4:
        nested = None
        if self.nested_absmax is not None:
            assert self.nested_quant_map is not None and self.nested_offset is not None
            nested = Nested(self.nested_absmax, self.nested_quant_map, self.nested_offset)
        return NF4(self.weight, self.absmax, nested)

    def dequantize_rows(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Dequantize rows `start` to `stop` of W, (stop - start, in_features)."""
        columns = self.in_features
        flat = dequantize_range(self._quantized(), start * columns, stop * columns, self.layout.block_size)
        return flat.view(-1, columns).to(dtype)

    def scales(self) -> Tensor:
        """Return the absmax of each block, dequantized: float32 (blocks,)."""
        return _dequantize_scales(self._quantized(), 0, self.layout.num_blocks)
