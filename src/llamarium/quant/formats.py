"""Every type that weights are stored in, as one table.

A type has one name everywhere, GGUF's: in files, in Python, in C (`LM_Q4_1`), on the command line and in the docs. NF4,
which GGUF lacks, has bitsandbytes' name.

In a file a row is a run of equal blocks. A block is a few small integers ("codes"), one per weight, and one or two
scales that turn codes back into weights. The K types put 256 weights in a block and quantize the scales of its 16 or 32
sub-blocks once more.

Types that the CPU kernels multiply can also be packed: laid out in tiles, 16 rows by 32 or 256 columns, in the order in
which a product reads them. `native/tiles.h` says what lies where in a tile. Packing loses nothing, and a tile takes the
bytes of the blocks that it is made of.

Nothing here needs torch, so that file readers can check sizes before anything is loaded.

Source: ggml, `ggml-common.h` (block structs) and `ggml.h` (`enum ggml_type`); bitsandbytes, `quantize_4bit`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from llamarium.errors import CheckpointError, OptionError, UnsupportedFormatError, escape, show_value

Choice = TypeVar("Choice", bound=str)

TILE_ROWS, GROUP, SUPER = 16, 32, 256
"""Rows of a tile, and its columns: those of a group, which shares a scale, or in the K types those of a whole block."""

IQ4_NL_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What the 16 codes of IQ4_NL stand for, before the scale."""


@dataclass(frozen=True, slots=True)
class Format:
    """A type of weights.

    Attributes:
        name: GGUF's name for it.
        ggml_type: Its number in GGUF files; None where they have no such type.
        weight: What a weight is: q is its code, d and m are the block's scale and minimum.
    """

    name: str
    ggml_type: int | None
    block_size: int
    block_bytes: int
    weight: str

    @property
    def bits_per_weight(self) -> float:
        """What a weight takes, its share of the scales included."""
        return 8 * self.block_bytes / self.block_size

    def row_bytes(self, num_columns: int) -> int:
        """Return the bytes of a row; CheckpointError if its weights are no whole number of blocks."""
        if num_columns % self.block_size:
            raise CheckpointError(
                f"a row of {num_columns} weights cannot be {self.name}; expected a multiple of {self.block_size}"
            )
        return num_columns // self.block_size * self.block_bytes

    def num_columns(self, row_bytes: int) -> int:
        """Return the weights of a row; CheckpointError if its bytes are no whole number of blocks."""
        if row_bytes % self.block_bytes:
            raise CheckpointError(
                f"a row of {row_bytes} bytes cannot be {self.name}; expected a multiple of {self.block_bytes}"
            )
        return row_bytes // self.block_bytes * self.block_size


@dataclass(frozen=True, slots=True)
class PackedFormat(Format):
    """A type that the CPU kernels multiply, and how its tiles are laid out; C has the same in `native/tiles.h`.

    Attributes:
        kind: The kernels' number for it, `LM_...` in C.
        code_bytes: Bytes of a group's codes, 16 rows of 32 columns.
        zero: The code that stands for 0.
        has_minimum: Whether a group has a minimum besides its scale.
        levels: What the 16 codes stand for, before the scale; None where they are evenly spaced.
    """

    kind: int
    code_bytes: int
    zero: int
    has_minimum: bool = False
    levels: tuple[int, ...] | None = None

    @property
    def is_super(self) -> bool:
        """Whether scales are quantized in their turn, in blocks of 256 columns: the K types."""
        return self.block_size == SUPER

    @property
    def columns(self) -> int:
        """Columns of a tile; a row is a whole number of tiles."""
        return self.block_size

    @property
    def num_levels(self) -> int:
        """How many values a code has: 2 to the power of its bits."""
        return 1 << (8 * self.code_bytes // (TILE_ROWS * GROUP))

    @property
    def half_bytes(self) -> int:
        """Bytes of a tile's float16 numbers: 16 scales, and 16 minima if there are any."""
        return 2 * TILE_ROWS * (1 + self.has_minimum)

    @property
    def head_bytes(self) -> int:
        """Bytes of a tile before its codes."""
        if not self.is_super:
            return 0
        return self.half_bytes + (192 if self.has_minimum else 256 if self.levels is None else 96)

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile, scales included."""
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
"""Every type, by name. s and t are the small integers with which the K types multiply d and m for a sub-block.

In the types from IQ3_S on a code stands for four or eight weights at once, a vector of a codebook."""

GGML_TYPES = {name: item for name, item in FORMATS.items() if item.ggml_type is not None}
"""Those of GGUF files."""

PACKED_FORMATS = {name: item for name, item in FORMATS.items() if isinstance(item, PackedFormat)}
"""Those that the CPU kernels multiply in tiles."""

ENCODED = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "Q4_K", "Q5_K", "Q6_K")
"""The types that `quant/ggml/encode.py` makes of weights."""

METHODS = ("NF4", *(name for name in PACKED_FORMATS if name in ENCODED))
"""The types to which Linears can be quantized while a model is loaded."""

SMALLER_BLOCKS = {"Q6_K": "Q8_0", "Q5_K": "Q5_1", "Q4_K": "Q5_0"}
"""What takes the place of a K type where rows are no multiple of 256 weights, as in llama.cpp."""


def quantized_type(method: str, num_columns: int) -> str | None:
    """Return the type to which rows of `num_columns` weights are quantized; None where they stay floating-point.

    It is `method` where rows are whole blocks of it. Rows that are no multiple of 256 cannot be of a K type, and take
    the next type with blocks of 32 that the C kernels multiply; rows that are no multiple of 32 stay as they are.
    """
    if method == "NF4" or num_columns % FORMATS[method].block_size == 0:
        return method
    smaller = SMALLER_BLOCKS.get(method, method)
    smaller = smaller if smaller in PACKED_FORMATS else "Q8_0"
    return None if num_columns % FORMATS[smaller].block_size else smaller


def block_format(type_name: str) -> Format:
    """Return a GGUF type by name; UnsupportedFormatError if it is not read."""
    if type_name not in GGML_TYPES:
        raise UnsupportedFormatError(
            f"block format {escape(type_name, 40)} is not read; supported are {', '.join(GGML_TYPES)}"
        )
    return GGML_TYPES[type_name]


def chosen_type(option: str, value: object, choices: Sequence[Choice]) -> Choice:
    """Return the one of `choices` that an option names, in capital letters or not; OptionError if it is none."""
    text = value.lower() if isinstance(value, str) else None
    for choice in choices:
        if text == choice.lower():
            return choice
    raise OptionError(f"{option} is {show_value(value)}; expected one of {', '.join(choices)}")
