"""The protobuf wire format: a message is a sequence of fields, each with a number, a type and a value.

Only the types in a `tokenizer.model` are supported: varints, fixed-size numbers, and length-delimited bytes. Every
length is checked against the rest of the message, so parsing takes no memory beyond the file.

Source: protobuf.dev, "Encoding".
"""

import struct
from collections.abc import Iterator

from llamarium.errors import TokenizerError

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_WIDTH = {FIXED64: 8, FIXED32: 4}
_MAX_VARINT_BYTES = 10

Field = tuple[int, int, int | bytes]
"""Number, type and value: int for a varint, bytes for other types."""


def read_fields(data: bytes, source: str) -> Iterator[Field]:
    """Yield the fields of a message; TokenizerError if the data is malformed."""
    position, end = 0, len(data)
    while position < end:
        start = position
        tag, position = _varint(data, position, source)
        number, kind = tag >> 3, tag & 7
        if not 0 < number < 2**29:
            raise _damaged(source, start, f"field number {number}; expected 1 to {2**29 - 1}")
        if kind == VARINT:
            value, position = _varint(data, position, source)
            yield number, kind, value
            continue
        if kind == BYTES:
            length, position = _varint(data, position, source)
        elif kind in _WIDTH:
            length = _WIDTH[kind]
        else:
            raise _damaged(source, start, f"wire type {kind}; expected 0, 1, 2 or 5")
        if length > end - position:
            raise _damaged(source, start, f"field {number} has {length} bytes and {end - position} are left")
        yield number, kind, data[position : position + length]
        position += length


def write_field(number: int, value: bool | int | float | bytes | str) -> bytes:
    """Serialize a field: booleans and integers as varints, floats with 32 bits, text and messages with a length."""
    if isinstance(value, float):
        return _write_varint(number << 3 | FIXED32) + struct.pack("<f", value)
    if isinstance(value, int):
        return _write_varint(number << 3 | VARINT) + _write_varint(value % 2**64)
    data = value.encode("utf-8") if isinstance(value, str) else value
    return _write_varint(number << 3 | BYTES) + _write_varint(len(data)) + data


def _varint(data: bytes, position: int, source: str) -> tuple[int, int]:
    """Return the varint at `position` (seven bits per byte, the lowest first), and its end."""
    value = 0
    for count, byte in enumerate(data[position : position + _MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << 7 * count
        if byte < 0x80:
            return value & 2**64 - 1, position + count + 1
    raise _damaged(source, position, "a number that does not end")


def _write_varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _damaged(source: str, position: int, found: str) -> TokenizerError:
    return TokenizerError(
        f"{source}: damaged SentencePiece file: {found}, at byte {position} of a message; copy or download it again"
    )
