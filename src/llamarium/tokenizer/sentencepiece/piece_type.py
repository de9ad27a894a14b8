"""Types of the pieces of a vocabulary."""

from enum import IntEnum


class PieceType(IntEnum):
    """The type of a piece; values are those of the file, and of GGUF's `token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6
