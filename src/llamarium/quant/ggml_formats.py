"""The block formats of GGUF files as a table: how many weights one block holds, in how many bytes.

A row of a GGUF tensor is a run of equal blocks. A block is a few small integers ("codes"), one per weight, and one
or two half-precision scales that turn codes back into weights: `w = d * code` or `w = d * code + m`. The K formats
put 256 weights in a block and quantize the scales of its 16 or 32 sub-blocks once more.

Nothing here needs torch, so that file readers can check sizes before anything is loaded.

Source: ggml, `ggml-common.h` (block structs) and `ggml.h` (`enum ggml_type`).
"""

from dataclasses import dataclass

from llamarium.errors import CheckpointError, UnsupportedFormatError, escape


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """One format.

    Attributes:
        name: ggml's name for it.
        ggml_type: Its number in GGUF files.
        block_size: Weights in a block.
        block_bytes: Bytes of a block.
    """

    name: str
    ggml_type: int
    block_size: int
    block_bytes: int

    def row_bytes(self, num_columns: int) -> int:
        """Return the bytes of a row of `num_columns` weights.

        Raises:
            CheckpointError: If the row is no whole number of blocks.
        """
        if num_columns % self.block_size:
            raise CheckpointError(
                f"a row of {num_columns} weights cannot be {self.name}; expected a multiple of {self.block_size}"
            )
        return num_columns // self.block_size * self.block_bytes

    def num_columns(self, row_bytes: int) -> int:
        """Return the weights in a row of `row_bytes` bytes.

        Raises:
            CheckpointError: If the row is no whole number of blocks.
        """
        if row_bytes % self.block_bytes:
            raise CheckpointError(
                f"a row of {row_bytes} bytes cannot be {self.name}; expected a multiple of {self.block_bytes}"
            )
        return row_bytes // self.block_bytes * self.block_size


_FORMATS = (
    BlockFormat("F32", 0, 1, 4),
    BlockFormat("F16", 1, 1, 2),
    BlockFormat("Q4_0", 2, 32, 18),
    BlockFormat("Q4_1", 3, 32, 20),
    BlockFormat("Q5_0", 6, 32, 22),
    BlockFormat("Q5_1", 7, 32, 24),
    BlockFormat("Q8_0", 8, 32, 34),
    BlockFormat("Q2_K", 10, 256, 84),
    BlockFormat("Q3_K", 11, 256, 110),
    BlockFormat("Q4_K", 12, 256, 144),
    BlockFormat("Q5_K", 13, 256, 176),
    BlockFormat("Q6_K", 14, 256, 210),
    BlockFormat("IQ4_NL", 20, 32, 18),
    BlockFormat("BF16", 30, 1, 2),
)

GGML_TYPES: dict[str, BlockFormat] = {f.name: f for f in _FORMATS}
"""Every format that is read, by name."""


def block_format(type_name: str) -> BlockFormat:
    """Return the format called `type_name`.

    Raises:
        UnsupportedFormatError: If it is not read, with those that are.
    """
    if type_name not in GGML_TYPES:
        raise UnsupportedFormatError(
            f"block format {escape(type_name, 40)} is not read; supported are {', '.join(GGML_TYPES)}"
        )
    return GGML_TYPES[type_name]
