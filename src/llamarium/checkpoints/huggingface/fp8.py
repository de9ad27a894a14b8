"""Weights in 8-bit floating point with scales, as transformers, vLLM, AutoFP8 and fbgemm save them.

    X.weight            float8_e4m3fn (out, in)
    X.weight_scale_inv  float32 (row blocks, column blocks): the factor that makes weights of them, in spite of its name
    X.weight_scale      instead of it: one for the weight, or (out, 1), one for each row
    X.input_scale       of activations, which are not quantized here

Source: transformers, `integrations/finegrained_fp8.py` and `fbgemm_fp8.py`; AutoFP8, `auto_fp8/quantize.py`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from llamarium.checkpoints.huggingface.components import (
    SCALE_DTYPES,
    ComponentGroup,
    Components,
    ConfigFields,
    Scheme,
)

_MOST_BLOCK = 2**20


@dataclass(frozen=True)
class FP8(Scheme):
    """What a `quantization_config` of FP8 says.

    Attributes:
        block: Rows and columns of a block; None where a scale is for a weight or a row.
    """

    marker = "weight"
    marker_dtype = "F8_E4M3"
    parts = ("weight", "weight_scale", "weight_scale_inv")
    hints = frozenset(("input_scale", "activation_scale", "input_scale_ub", "k_scale", "v_scale"))

    block: tuple[int, int] | None

    @property
    def rounds_inputs(self) -> bool:
        """See `Scheme`: all kernels for these weights round activations."""
        return True

    @classmethod
    def from_config(cls, fields: ConfigFields) -> "FP8":
        """Read the config of `fp8` or `fbgemm_fp8`."""
        value = fields.fields.get("weight_block_size")
        return cls(None if value is None else block_shape(fields, "weight_block_size", value))

    def group(self, components: Components, shape: tuple[int, int]) -> ComponentGroup:
        """Check the components of one weight against its shape (out, in)."""
        return float8_group(components, shape, self.block)


def block_shape(fields: ConfigFields, name: str, value: object) -> tuple[int, int]:
    """Return a block's rows and columns: [128, 128], or "128x128" in files of older versions of compressed-tensors."""
    if isinstance(value, str) and (written := re.fullmatch(r"([0-9]{1,6})x([0-9]{1,6})", value)):
        value = [int(size) for size in written.groups()]
    sizes = cast(list[Any], value) if isinstance(value, list) else []
    if len(sizes) != 2 or not all(type(size) is int and 1 <= size <= _MOST_BLOCK for size in sizes):
        raise fields.fault(name, value, "rows and columns of a block, such as [128, 128]")
    return sizes[0], sizes[1]


def float8_group(
    components: Components, shape: tuple[int, int], block: tuple[int, int] | None, group_size: int | None = None
) -> ComponentGroup:
    """Check a weight in 8-bit floating point and its scales, and return it.

    Args:
        components: `weight`, and `weight_scale` or `weight_scale_inv`.
        shape: (out, in).
        block: Rows and columns that share a scale; None where it is for the weight, a row, or a group of columns.
        group_size: Columns that share one, or None.
    """
    num_rows, num_columns = shape
    part = "weight_scale_inv" if "weight_scale_inv" in components else "weight_scale"
    components.check("weight", ["F8_E4M3"], [shape], "by the model's config")
    components.need(part, "beside a weight in 8-bit floating point")
    sizes: dict[tuple[int, ...], tuple[int, int]] = dict.fromkeys(((), (1,), (1, 1)), (num_rows, num_columns))
    sizes |= {(num_rows,): (1, num_columns), (num_rows, 1): (1, num_columns)}
    if group_size is not None:
        sizes[num_rows, -(-num_columns // group_size)] = (1, group_size)
    if block is not None:
        sizes = {(-(-num_rows // block[0]), -(-num_columns // block[1])): block}
    why = "a scale for the weight, each row, or each block by the config"
    components.check(part, (*SCALE_DTYPES, "F8_E8M0"), sizes, why)
    rows_and_columns = np.array(sizes[components.shape(part)], np.int64)

    def read() -> Mapping[str, NDArray[Any]]:
        scales = _scales(components, part)
        shape_of_blocks = -(-num_rows // int(rows_and_columns[0])), -(-num_columns // int(rows_and_columns[1]))
        return {"scales": scales.reshape(shape_of_blocks), "block": rows_and_columns}

    return ComponentGroup("FP8", shape, components, "weight", read)


def _scales(components: Components, part: str) -> NDArray[np.float32]:
    values = components.array(part)
    if values.dtype == np.uint8:  # an exponent alone, 127 for 1; 255 is NaN
        return np.where(values == 255, np.float32(np.nan), np.exp2(values.astype(np.float32) - 127))
    return components.floats(part).astype(np.float32)
