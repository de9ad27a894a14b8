"""What the pieces of a vocabulary are."""

from enum import IntEnum


class PieceType(IntEnum):
    """What a piece is; the numbers are those of the file, and of a GGUF's `token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6
