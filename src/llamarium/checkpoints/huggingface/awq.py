"""AWQ as AutoAWQ saves it: 4-bit codes, eight of them in a word of 32 bits.

    X.qweight   int32   GEMM: (in, out / 8). GEMV: (out, in / 8)
    X.qzeros    int32   GEMM: (groups, out / 8). GEMV: (out, words that hold the groups' zero points)
    X.scales    float16 GEMM: (groups, out). GEMV: (out, 8 * those words)

A weight is `(q - z) * scale`. In GEMM's words the even columns come before the odd ones: 0 2 4 6 1 3 5 7.

Source: AutoAWQ 0.2.9, `awq/modules/linear/gemm.py` and `gemv.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamarium.checkpoints.huggingface.components import (
    SCALE_DTYPES,
    ComponentGroup,
    Components,
    ConfigFields,
    Scheme,
    group_size_of,
    groups_of_columns,
)
from llamarium.quant.grouped import unpack_awq, unpack_bits

_LAYOUTS = ("gemm", "gemv")
_WORDS = ("I32", "U32")
_MIDDLE = 8  # the code of zero without zero points


@dataclass(frozen=True)
class AWQ(Scheme):
    """What a `quantization_config` of AWQ says."""

    marker = "qweight"
    parts = ("qweight", "qzeros", "scales")

    group_size: int
    is_gemv: bool
    has_zeros: bool

    @classmethod
    def from_config(cls, fields: ConfigFields) -> "AWQ":
        """Read the config; AutoAWQ's own file calls some fields otherwise."""
        version = fields.text("version", fields.text("format", "gemm"))
        if version not in _LAYOUTS:
            raise fields.other_layout("AWQ", version, _LAYOUTS)
        for name in ("bits", "w_bit"):
            fields.integer(name, 4, lambda bits: bits == 4, "4, as AWQ has no other codes")
        size = group_size_of(fields, "q_group_size" if "q_group_size" in fields.fields else "group_size")
        return cls(size, version == "gemv", fields.flag("zero_point", default=True))

    def group(self, components: Components, shape: tuple[int, int]) -> ComponentGroup:
        """Check the components of one weight against its shape (out, in)."""
        return self._gemv(components, shape) if self.is_gemv else self._gemm(components, shape)

    def _gemm(self, components: Components, shape: tuple[int, int]) -> ComponentGroup:
        num_rows, num_columns = shape
        size = num_columns if self.group_size == -1 else self.group_size
        groups = -(-num_columns // size)
        why = f"4-bit codes of a weight {shape} in groups of {size}, as gemm has them"
        components.check("qweight", _WORDS, [(num_columns, -(-num_rows // 8))], why)
        components.check("scales", SCALE_DTYPES, [(groups, num_rows)], why)
        if self.has_zeros or "qzeros" in components:
            components.check("qzeros", _WORDS, [(groups, -(-num_rows // 8))], why)

        def read() -> Mapping[str, NDArray[Any]]:
            zeros = np.full((num_rows, groups), _MIDDLE, np.int16)
            if "qzeros" in components:
                zeros = unpack_awq(np, components.rows("qzeros"), (num_rows, groups), 0, num_rows).astype(np.int16)
            state = {"scales": components.floats("scales").T, "zeros": zeros}
            return state | groups_of_columns(num_columns, size)

        return ComponentGroup("AWQ4", shape, components, "qweight", read)

    def _gemv(self, components: Components, shape: tuple[int, int]) -> ComponentGroup:
        num_rows, num_columns = shape
        size = num_columns if self.group_size == -1 else self.group_size
        groups = -(-num_columns // size)
        why = f"4-bit codes of a weight {shape} in groups of {size}, as gemv has them"
        components.check("qweight", _WORDS, [(num_rows, -(-num_columns // 8))], why)
        components.need("qzeros", why)
        width = max([-(-groups // 8), *components.shape("qzeros")[-1:]])  # AutoAWQ pads it
        components.check("qzeros", _WORDS, [(num_rows, width)], why)
        components.check("scales", SCALE_DTYPES, [(num_rows, 8 * width)], why)

        def read() -> Mapping[str, NDArray[Any]]:
            zeros = unpack_bits(np, components.rows("qzeros"), 4, groups).astype(np.int16)
            state = {"scales": components.floats("scales")[:, :groups], "zeros": zeros}
            return state | groups_of_columns(num_columns, size)

        return ComponentGroup("AWQ4_GEMV", shape, components, "qweight", read)
