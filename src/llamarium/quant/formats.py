"""The table of all types of stored weights. Torch-free.

A type has the same name everywhere, the one that GGUF uses: in files, in Python, in C (`LM_Q4_1`), on the command line
and in the docs. NF4, which GGUF does not have, has bitsandbytes' name.

In a file a row is a sequence of equal blocks. A block consists of small integers (codes), one per weight, and one or
two scales that map codes to weights. A block of a K type has 256 weights, and the scales of its 8 or 16 sub-blocks are
quantized too.

Types that the CPU kernels multiply can also be packed: stored in tiles of 16 rows by 32 or 256 columns, in the order in
which the kernels read them. `native/tiles.h` defines the layout of a tile. Packing is lossless, and a tile has the same
size as its blocks.

Source: ggml, `ggml-common.h` (block structs) and `ggml.h` (`enum ggml_type`); bitsandbytes, `quantize_4bit`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from llamarium.errors import CheckpointError, OptionError, UnsupportedFormatError, escape, show_value

Choice = TypeVar("Choice", bound=str)

TILE_ROWS, GROUP, SUPER = 16, 32, 256
"""Rows per tile; columns per group, which shares a scale; columns per block of a K type."""

IQ4_NL_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Values of the 16 codes of IQ4_NL, before scaling."""


@dataclass(frozen=True, slots=True)
class Format:
    """A type of stored weights.

    Attributes:
        name: Name, as in GGUF.
        ggml_type: Number in GGUF files; None if GGUF does not have the type.
        block_size: Weights per block.
        block_bytes: Bytes per block.
        weight: Formula of a weight, for display: q is its code, d and m are the block's scale and minimum.
    """

    name: str
    ggml_type: int | None
    block_size: int
    block_bytes: int
    weight: str

    @property
    def bits_per_weight(self) -> float:
        """Bits per weight, including scales."""
        return 8 * self.block_bytes / self.block_size

    def row_bytes(self, num_columns: int) -> int:
        """Return the bytes of a row; CheckpointError if its weights are not a whole number of blocks."""
        if num_columns % self.block_size:
            raise CheckpointError(
                f"a row of {num_columns} weights cannot be {self.name}; expected a multiple of {self.block_size}"
            )
        return num_columns // self.block_size * self.block_bytes

    def num_columns(self, row_bytes: int) -> int:
        """Return the weights of a row; CheckpointError if its bytes are not a whole number of blocks."""
        if row_bytes % self.block_bytes:
            raise CheckpointError(
                f"a row of {row_bytes} bytes cannot be {self.name}; expected a multiple of {self.block_bytes}"
            )
        return row_bytes // self.block_bytes * self.block_size


@dataclass(frozen=True, slots=True)
class PackedFormat(Format):
    """A type that the CPU kernels multiply, with the layout of its tiles, as in `native/tiles.h`.

    Attributes:
        kind: Number of the type in the kernels, `LM_...` in C.
        code_bytes: Bytes of the codes of a group, 16 rows of 32 columns.
        zero: Code of the value 0.
        has_minimum: True if a group has a minimum in addition to its scale.
        levels: Values of the 16 codes, before scaling; None if they are evenly spaced.
    """

    kind: int
    code_bytes: int
    zero: int
    has_minimum: bool = False
    levels: tuple[int, ...] | None = None

    @property
    def is_super(self) -> bool:
        """True for types with blocks of 256 columns, whose scales are quantized too."""
        return self.block_size == SUPER

    @property
    def columns(self) -> int:
        """Columns per tile; a row is a whole number of tiles."""
        return self.block_size

    @property
    def num_levels(self) -> int:
        """Number of values of a code: 2 to the power of its bits."""
        return 1 << (8 * self.code_bytes // (TILE_ROWS * GROUP))

    @property
    def half_bytes(self) -> int:
        """Bytes of a tile's float16 numbers: 16 scales, and 16 minima if the type has them."""
        return 2 * TILE_ROWS * (1 + self.has_minimum)

    @property
    def head_bytes(self) -> int:
        """Bytes of a tile before its codes."""
        if not self.is_super:
            return 0
        return self.half_bytes + (192 if self.has_minimum else 256 if self.levels is None else 96)

    @property
    def tile_bytes(self) -> int:
        """Bytes per tile, including scales."""
        return TILE_ROWS * self.block_bytes


FORMATS: dict[str, Format] = {
    item.name: item
    for item in (
        Format("F32", 0, 1, 4, "float32"),
        Format("F16", 1, 1, 2, "float16"),
        Format("BF16", 30, 1, 2, "bfloat16"),
        PackedFormat("Q8_0", 8, 32, 34, "d * q", kind=1, code_bytes=512, zero=128),
        PackedFormat("Q4_0", 2, 32, 18, "d * (q - 8)", kind=2, code_bytes=256, zero=8),
        PackedFormat("Q4_1", 3, 32, 20, "d * q + m", kind=3, code_bytes=256, zero=0, has_minimum=True),
        PackedFormat("IQ4_NL", 20, 32, 18, "d * levels[q]", kind=4, code_bytes=256, zero=0, levels=IQ4_NL_VALUES),
        PackedFormat("Q4_K", 12, 256, 144, "d * s * q - m * t", kind=5, code_bytes=256, zero=0, has_minimum=True),
        PackedFormat("Q5_K", 13, 256, 176, "d * s * q - m * t", kind=6, code_bytes=320, zero=0, has_minimum=True),
        PackedFormat("Q6_K", 14, 256, 210, "d * s * (q - 32)", kind=7, code_bytes=384, zero=32),
        PackedFormat("Q5_0", 6, 32, 22, "d * (q - 16)", kind=9, code_bytes=320, zero=16),
        Format("Q5_1", 7, 32, 24, "d * q + m"),
        Format("Q2_K", 10, 256, 84, "d * s * q - m * t"),
        Format("Q3_K", 11, 256, 110, "d * s * (q - 4)"),
        PackedFormat(
            "IQ4_XS", 23, 256, 136, "d * s * levels[q]", kind=11, code_bytes=256, zero=0, levels=IQ4_NL_VALUES
        ),
        Format("IQ3_S", 21, 256, 110, "d * s * vector[q]"),
        Format("IQ3_XXS", 18, 256, 98, "d * s * vector[q]"),
        Format("IQ2_S", 22, 256, 82, "d * s * vector[q]"),
        Format("IQ2_XS", 17, 256, 74, "d * s * vector[q]"),
        Format("IQ2_XXS", 16, 256, 66, "d * s * vector[q]"),
        Format("IQ1_M", 29, 256, 56, "d * s * (vector[q] + shift)"),
        Format("IQ1_S", 19, 256, 50, "d * s * (vector[q] + shift)"),
        Format("NF4", None, 64, 33, "absmax * levels[q]"),
    )
}
"""All types, by name. s and t are integers per sub-block by which the K types multiply d and m.

From IQ3_S to IQ1_S, a code selects a vector of four or eight weights from a codebook."""

GGML_TYPES = {name: item for name, item in FORMATS.items() if item.ggml_type is not None}
"""The types of GGUF files, by name."""

PACKED_FORMATS = {name: item for name, item in FORMATS.items() if isinstance(item, PackedFormat)}
"""The types that the CPU kernels multiply in tiles, by name."""

ENCODED = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "Q4_K", "Q5_K", "Q6_K")
"""The types that `quant/ggml/encode.py` can quantize to."""

METHODS = ("NF4", *(name for name in PACKED_FORMATS if name in ENCODED))
"""The types that Linears can be quantized to when a model is loaded."""

SMALLER_BLOCKS = {"Q6_K": "Q8_0", "Q5_K": "Q5_1", "Q4_K": "Q5_0"}
"""Replacement of a K type for rows that are not a multiple of 256 weights, as in llama.cpp."""


def quantized_type(method: str, num_columns: int) -> str | None:
    """Return the type that rows of `num_columns` weights are quantized to; None if they stay floating-point.

    It is `method` if rows are a whole number of its blocks. For rows that are not a multiple of 256, a K type is
    replaced by a type with blocks of 32 that the C kernels multiply; rows that are not a multiple of 32 are not
    quantized.
    """
    if method == "NF4" or num_columns % FORMATS[method].block_size == 0:
        return method
    smaller = SMALLER_BLOCKS.get(method, method)
    smaller = smaller if smaller in PACKED_FORMATS else "Q8_0"
    return None if num_columns % FORMATS[smaller].block_size else smaller


def block_format(type_name: str) -> Format:
    """Return a GGUF type by name; UnsupportedFormatError if it is not supported."""
    if type_name not in GGML_TYPES:
        raise UnsupportedFormatError(
            f"block format {escape(type_name, 40)} is not read; supported are {', '.join(GGML_TYPES)}"
        )
    return GGML_TYPES[type_name]


def chosen_type(option: str, value: object, choices: Sequence[Choice]) -> Choice:
    """Return the choice that an option's value names, ignoring case; OptionError if there is none."""
    text = value.lower() if isinstance(value, str) else None
    for choice in choices:
        if text == choice.lower():
            return choice
    raise OptionError(f"{option} is {show_value(value)}; expected one of {', '.join(choices)}")
