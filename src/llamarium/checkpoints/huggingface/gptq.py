"""GPTQ as AutoGPTQ and GPTQModel save it: codes of 2, 3, 4 or 8 bits, one output feature below the other.

    X.qweight   int32   (in * bits / 32, out)
    X.qzeros    int32   (groups, out * bits / 32)
    X.scales    float16 (groups, out)
    X.g_idx     int32   (in,): the group of each column; without it, or all zero, groups follow each other

A weight is `(q - z) * scale`. The first version of the format stores z - 1, which wraps around for z = 0; in
`gptq_v2` z is stored as it is.

Source: AutoGPTQ 0.7.1, `nn_modules/qlinear/qlinear_cuda_old.py`; GPTQModel, `utils/model.py`,
`convert_gptq_v1_to_v2_format_module`.
"""

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
    group_size_of,
    groups_of_columns,
)
from llamarium.errors import CheckpointError
from llamarium.quant.grouped import unpack_bits

BITS = (2, 3, 4, 8)
_LAYOUTS = ("gptq", "gptq_v2")
_WORDS = ("I32", "U32")


@dataclass(frozen=True)
class GPTQ(Scheme):
    """What a `quantization_config` of GPTQ says.

    Attributes:
        is_dynamic: Some weights have other bits and group sizes, which their shapes tell.
        adds_one: Zero points are stored minus one.
        carries: They were made so by a subtraction from whole words (GPTQModel), which a zero point of 0 borrows from
            its neighbour; an addition to whole words undoes that. AutoGPTQ wraps each one around by itself.
    """

    marker = "qweight"
    parts = ("qweight", "qzeros", "scales", "g_idx")

    bits: int
    group_size: int
    is_dynamic: bool
    adds_one: bool
    carries: bool

    @classmethod
    def from_config(cls, fields: ConfigFields) -> "GPTQ":
        """Read the config."""
        layout = fields.text("checkpoint_format", fields.text("format", "gptq"))
        if layout in _LAYOUTS and fields.fields.get("is_marlin_format") is True:
            layout = "marlin"
        if layout not in _LAYOUTS:
            raise fields.other_layout("GPTQ", layout, _LAYOUTS)
        maker = fields.mapping("meta").get("quantizer", "")
        names = cast(list[Any], maker) if isinstance(maker, list) else [maker]
        return cls(
            fields.integer("bits", 4, lambda bits: bits in BITS, "2, 3, 4 or 8"),
            group_size_of(fields),
            bool(fields.mapping("dynamic")),
            adds_one=layout == "gptq",
            carries=any(str(name).startswith("gptqmodel") for name in names),
        )

    def group(self, components: Components, shape: tuple[int, int]) -> ComponentGroup:
        """Check the components of one weight against its shape (out, in)."""
        num_rows, num_columns = shape
        bits, size = self._layout_of(components, shape)
        groups = -(-num_columns // size)
        why = f"{bits}-bit codes of a weight {shape} in groups of {size}"
        components.check("qweight", _WORDS, [(-(-num_columns * bits // 32), num_rows)], why)
        components.check("scales", SCALE_DTYPES, [(groups, num_rows)], why)
        components.check("qzeros", _WORDS, [(groups, -(-num_rows * bits // 32))], why)
        order = self._order(components, num_columns, size, groups)

        def read() -> Mapping[str, NDArray[Any]]:
            zeros = self._zeros(components, bits, num_rows)
            state = {"scales": components.floats("scales").T, "zeros": zeros.T}
            return {**state, **order}

        return ComponentGroup(f"GPTQ{bits}", shape, components, "qweight", read)

    def _layout_of(self, components: Components, shape: tuple[int, int]) -> tuple[int, int]:
        """Return bits and group size of one weight: the config's, or where weights differ, what its shapes say."""
        num_columns = shape[1]
        size = num_columns if self.group_size == -1 else self.group_size
        if not self.is_dynamic:
            return self.bits, size
        components.need("scales", "with qweight and qzeros")
        words, groups = (components.shape(part)[:1] for part in ("qweight", "scales"))
        bits = next((bits for bits in BITS if (-(-num_columns * bits // 32),) == words), self.bits)
        return bits, size if (-(-num_columns // size),) == groups else -(-num_columns // max([1, *groups]))

    def _order(
        self, components: Components, num_columns: int, size: int, groups: int
    ) -> Mapping[str, NDArray[np.int64]]:
        """Return the group of each column, where groups do not follow each other in equal parts."""
        in_order = groups_of_columns(num_columns, size)
        if "g_idx" not in components:
            return in_order
        components.check("g_idx", ("I32", "I64"), [(num_columns,)], "the group of each column")
        order = components.array("g_idx").astype(np.int64)
        if order.size and not (int(order.min()) >= 0 and int(order.max()) < groups):
            raise CheckpointError(
                f"{components.where('g_idx')} has groups from {order.min()} to {order.max()}; expected 0 to "
                f"{groups - 1}, as there are {groups} groups of {size} columns"
            )
        if not order.any() or np.array_equal(order, np.arange(num_columns) // size):
            return in_order
        return {"groups": order}

    def _zeros(self, components: Components, bits: int, num_rows: int) -> NDArray[np.int16]:
        """Return the zero points: int16 (groups, out)."""
        words = components.array("qzeros").view(np.uint32)
        if self.adds_one and self.carries and 32 % bits == 0:
            words = words + np.uint32(sum(1 << place for place in range(0, 32, bits)))
        packed = np.ascontiguousarray(words).view(np.uint8)
        zeros = unpack_bits(np, packed, bits, num_rows).astype(np.int16)
        if not self.adds_one or (self.carries and 32 % bits == 0):
            return zeros
        return (zeros + 1) & (2**bits - 1)
