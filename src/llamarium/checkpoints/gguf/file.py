"""The GGUF container: metadata and a tensor table, followed by the tensors' bytes. Torch-free.

    magic "GGUF" | version | number of tensors | number of metadata entries
    metadata     key, type, value           (strings and arrays carry their length in front)
    tensor table name, dims, type, offset   (dims fastest first: the reverse of PyTorch's shape)
    padding to `general.alignment`
    data         each tensor at its offset, padded to the alignment

Counts in a file are not trusted: a reader that allocates memory by a count can be made to hang by 50 bytes. This reader
first compares each count with the remaining bytes, and the memory that it would need with a budget.

Source: ggml's `docs/gguf.md`, `gguf.cpp`.
"""

import math
import mmap
import struct
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from llamarium.errors import CheckpointError, UnsupportedFormatError, counted, escape
from llamarium.io import atomic_file, regular_size
from llamarium.quant.formats import GGML_TYPES, Format, block_format


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One row of the tensor table.

    Attributes:
        name: The name in the file, such as `blk.0.attn_q.weight`.
        shape: Row-major, (rows, columns): the file's dims reversed.
        offset: Where the bytes begin, counted from the beginning of the file.
        path: The file.
    """

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    type_name: str
    offset: int
    num_bytes: int
    path: Path


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """The header of a GGUF file.

    Attributes:
        path: The file.
        version: Version of the format.
        metadata: Metadata as Python values, arrays as lists.
        tensors: Tensor table, by name.
        paths: The file, or all parts of a split one, in order.
    """

    path: Path
    version: int
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]
    paths: tuple[Path, ...]


# What CPython takes is rounded up, so that a file of tiny items cannot outgrow the budget.
_SLACK_BYTES = 56 * 2**20


def read_gguf(path: Path, *, slack_bytes: int = _SLACK_BYTES) -> GGUFFile:
    """Read and validate the header of one GGUF file (version 2 or 3, little-endian); other parts are not read.

    Args:
        path: The file.
        slack_bytes: Memory that the header may take in addition to the file's size.

    Raises:
        ModelNotFoundError: If the file does not exist.
        CheckpointError: If the file is malformed; the message names the item.
        UnsupportedFormatError: For another version, a big-endian file, or an unsupported tensor type.
    """
    size = regular_size(path)
    if size < _HEADER.size:
        raise CheckpointError(f"{escape(path)}: {size} bytes; a GGUF file has a header of {_HEADER.size}")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        reader = _Reader(path, data, slack_bytes)
        try:
            return reader.read()
        except UnicodeDecodeError as error:
            raise reader.fault(f"a string is no UTF-8: {error.reason}") from None


_HEADER = struct.Struct("<4sIQQ")  # magic, version, tensors, metadata entries
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_ARRAY_HEAD = struct.Struct("<IQ")  # element type, length

# Value types by number: 8 is a string, 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9

_FORMAT_BY_NUMBER = {f.ggml_type: f for f in GGML_TYPES.values()}
# Published by ggml and not read here; for messages.
_UNREAD_TYPES = {
    4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 34: "TQ1_0", 35: "TQ2_0", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip

_DEFAULT_ALIGNMENT = 32
_MAX_ALIGNMENT = 2**16
_MAX_DIMS = 4  # GGML_MAX_DIMS
_MAX_ARRAY_DEPTH = 3
_MAX_ITEMS = 2**21  # entries, strings and numbers together; the header of Llama 3 has 540,000

_STRINGS_AT_ONCE = 2**13
_USUAL_BYTES = 24  # of a string with its length, on average, at most
_STRING_COST = 72  # an object and its place in a list; and each byte may become a character of four bytes
_NUMBER_COST = 40
_ENTRY_COST = 400


class _Reader:
    """A position in the file, and what may still be allocated."""

    def __init__(self, path: Path, data: mmap.mmap, slack_bytes: int) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.pos = 0
        self.budget = self.size + slack_bytes
        self.items = _MAX_ITEMS
        self.where = "the header"

    def fault(self, message: str) -> CheckpointError:
        return CheckpointError(f"{escape(self.path)}: {self.where}: {message}; the file is damaged or was cut short")

    def unsupported(self, message: str) -> UnsupportedFormatError:
        return UnsupportedFormatError(f"{escape(self.path)}: {message}")

    def charge(self, count: int, least_bytes: int, cost: int) -> None:
        """Refuse `count` items of at least `least_bytes` in the file and `cost` in memory before they are read."""
        num_left = self.size - self.pos
        if count * least_bytes > num_left:
            raise self.fault(
                f"{counted(count, 'item')} of at least {least_bytes} bytes announced, {counted(num_left, 'byte')} left"
            )
        self.budget -= count * cost
        self.items -= count
        if self.budget < 0 or self.items < 0:
            raise self.fault(f"{count} items are more than a header of a file of {self.size} bytes can need")

    def unpack(self, form: struct.Struct) -> tuple[Any, ...]:
        if self.pos + form.size > self.size:
            raise self.fault(f"{form.size} bytes expected at {self.pos}, the file ends at {self.size}")
        values = form.unpack_from(self.data, self.pos)
        self.pos += form.size
        return values

    def read(self) -> GGUFFile:
        magic, version, num_tensors, num_entries = self.unpack(_HEADER)
        if magic != b"GGUF":
            raise CheckpointError(f"{escape(self.path)}: is no GGUF file: begins with {magic!r}; expected b'GGUF'")
        if version not in (2, 3):
            swapped = version >= 2**16
            version_text = "a big-endian file" if swapped else f"GGUF version {version}"
            raise self.unsupported(f"{version_text}; read are versions 2 and 3, little-endian: convert the model anew")
        self.where = "the metadata"
        self.charge(num_entries, 13, _ENTRY_COST)  # a length, a type and a value of one byte
        metadata = self.read_metadata(num_entries)
        self.where = "the tensor table"
        self.charge(num_tensors, 24, _ENTRY_COST)  # a length, the number of dims, a type and an offset
        alignment = self.alignment(metadata)
        tensors = self.read_tensors(num_tensors, alignment)
        self.check_layout(tensors, alignment)
        return GGUFFile(self.path, version, metadata, tensors, (self.path,))

    def read_metadata(self, num_entries: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self.read_name("the metadata", "metadata", metadata)
            (kind,) = self.unpack(_U32)
            metadata[key] = self.read_array(depth=1) if kind == _ARRAY else self.read_values(kind, 1)[0]
        return metadata

    def read_name(self, table: str, subject: str, others: Container[str]) -> str:
        """Read the name that an entry of a table begins with, and that none of the others has."""
        self.where = table
        (name,) = self.read_strings(1)
        self.where = f"{subject} {escape(name, 80)}"
        if name in others:
            raise self.fault("is there twice")
        return name

    def read_array(self, depth: int) -> list[Any]:
        kind, count = self.unpack(_ARRAY_HEAD)
        if kind != _ARRAY:
            return self.read_values(kind, count)
        if depth == _MAX_ARRAY_DEPTH:
            raise self.fault(f"arrays are nested deeper than {_MAX_ARRAY_DEPTH}")
        self.charge(count, _ARRAY_HEAD.size, _ENTRY_COST)
        return [self.read_array(depth + 1) for _ in range(count)]

    def read_values(self, kind: int, count: int) -> list[Any]:
        if kind == _STRING:
            return self.read_strings(count)
        code = _SCALARS.get(kind)
        if code is None:
            raise self.fault(f"value type {kind}; there are 0 to {max(_SCALARS)}")
        self.charge(count, struct.calcsize(f"<{code}"), _NUMBER_COST)
        form = struct.Struct(f"<{count}{code}")
        if kind == _BOOL and self.data[self.pos : self.pos + count].strip(b"\0\1"):
            raise self.fault("a bool is neither 0 nor 1")
        return list(self.unpack(form))

    def read_strings(self, count: int) -> list[str]:
        """Read `count` strings; a vocabulary and its merges are 400,000 of them."""
        import numpy as np

        from llamarium.checkpoints.gguf.strings import decode_strings, find_short_strings

        self.charge(count, _U64.size, _STRING_COST)
        strings: list[str] = []
        for first in range(0, count, _STRINGS_AT_ONCE):
            begin, size = self.pos, min(_STRINGS_AT_ONCE, count - first)
            usual = self.data[begin : begin + _USUAL_BYTES * size] if size > 1 else b""
            places = find_short_strings(usual, size)
            if places is None or begin + int(places[-1]) > self.size:
                places = np.array(self.walk(size))
            num_bytes = int(places[-1])
            self.pos = begin + num_bytes
            self.budget -= 4 * (num_bytes - _U64.size * size)  # each byte may become a character of four bytes
            if self.budget < 0:
                raise self.fault(f"strings of {num_bytes} bytes are more than a header can need")
            strings += decode_strings(self.data[begin : self.pos], places)
        return strings

    def walk(self, count: int) -> list[int]:
        """Return where each of `count` strings, with its length in front, begins, and where the last one ends."""
        data, begin = self.data, self.pos
        num_left, unpack = self.size - begin, _U64.unpack_from
        places, pos = [0], 0
        for _ in range(count):
            start = pos + 8
            if start > num_left:
                raise self.fault(f"a string's length is cut off at {self.size}")
            pos = start + unpack(data, begin + pos)[0]
            if pos > num_left:
                raise self.fault(
                    f"a string of {pos - start} bytes at {begin + start}, {num_left - start} bytes are left"
                )
            places.append(pos)
        return places

    def alignment(self, metadata: Mapping[str, Any]) -> int:
        value = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        is_valid = isinstance(value, int) and 0 < value <= _MAX_ALIGNMENT and not value & (value - 1)
        if not is_valid or value is True:
            self.where = "metadata general.alignment"
            raise self.fault(f"is {escape(value, 40)}; expected a power of two up to {_MAX_ALIGNMENT}")
        return value

    def read_tensors(self, num_tensors: int, alignment: int) -> dict[str, GGUFTensor]:
        """Read the table; offsets are made absolute once its end is known."""
        rows: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(num_tensors):
            name = self.read_name("the tensor table", "tensor", rows)
            (num_dims,) = self.unpack(_U32)
            if num_dims > _MAX_DIMS:
                raise self.fault(f"has {num_dims} dimensions; ggml has at most {_MAX_DIMS}")
            dims = self.unpack(struct.Struct(f"<{num_dims}Q"))
            ggml_type, offset = self.unpack(_TYPE_AND_OFFSET)
            rows[name] = (dims[::-1], ggml_type, offset)
        start = _align(self.pos, alignment)
        return {name: self.tensor(name, *row, start, alignment) for name, row in rows.items()}

    def tensor(
        self, name: str, shape: tuple[int, ...], ggml_type: int, offset: int, start: int, alignment: int
    ) -> GGUFTensor:
        self.where = f"tensor {escape(name, 80)}"
        layout = _FORMAT_BY_NUMBER.get(ggml_type)
        if layout is None:
            type_text = f"{ggml_type} ({_UNREAD_TYPES.get(ggml_type, 'unknown')})"
            raise self.unsupported(f"{self.where} has ggml type {type_text}; read are {', '.join(GGML_TYPES)}")
        if not shape or 0 in shape:
            raise self.fault(f"has shape {shape}; expected at least one dimension, and none of 0")
        if shape[-1] % layout.block_size:
            raise self.fault(f"rows of {shape[-1]} weights; {layout.name} has blocks of {layout.block_size}")
        num_bytes = _num_bytes(shape, layout)
        if offset % alignment:
            raise self.fault(f"begins at {offset}, which is no multiple of the alignment {alignment}")
        if start + offset + num_bytes > self.size:
            raise self.fault(f"needs {num_bytes} bytes at {start + offset}; the file ends at {self.size}")
        return GGUFTensor(name, shape, ggml_type, layout.name, start + offset, num_bytes, self.path)

    def check_layout(self, tensors: Mapping[str, GGUFTensor], alignment: int) -> None:
        """Check that the tensors fill the data without overlap, gap or bytes left over, as ggml itself demands."""
        end = _align(self.pos, alignment)
        for tensor in sorted(tensors.values(), key=lambda t: t.offset):
            self.where = f"tensor {escape(tensor.name, 80)}"
            if tensor.offset != end:
                problem = "overlaps the tensor before it" if tensor.offset < end else "leaves a gap"
                raise self.fault(f"{problem}: begins at {tensor.offset}, expected at {end}")
            end = _align(tensor.offset + tensor.num_bytes, alignment)
        self.where = "the end"
        if self.size > end:
            raise self.fault(
                f"{counted(self.size - end, 'byte follows', 'bytes follow')} the last tensor, which ends at {end}"
            )


_TYPE_AND_OFFSET = struct.Struct("<IQ")


GGUFData = bytes | Callable[[], bytes | memoryview]


def write_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[str, tuple[int, ...], GGUFData]]
) -> None:
    """Write a GGUF file, version 3; `path` is complete or untouched.

    Args:
        path: Replaced if it exists.
        metadata: Python values. An int becomes uint32 where it fits, else int32, uint64 or int64; a float becomes
            float32; in a list, ints become int32 (ggml's type for token types), all others as alone.
        tensors: By name, the type's name, the row-major shape, and the bytes or a function that makes them when it is
            their turn, so that no two tensors need be in memory.

    Raises:
        CheckpointError: If a tensor's bytes do not fit its type and shape.
        UnsupportedFormatError: For a type that is not known.
        OSError: If the file cannot be written.
    """
    header = [_HEADER.pack(b"GGUF", 3, len(tensors), len(metadata))]
    header += [_pack_string(key) + _pack_value(value) for key, value in metadata.items()]
    offset, alignment = 0, metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    for name, (type_name, shape, _) in tensors.items():
        layout = block_format(type_name)
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        header.append(_pack_string(name) + dims + _TYPE_AND_OFFSET.pack(layout.ggml_type, offset))
        offset = _align(offset + _num_bytes(shape, layout), alignment)
    with atomic_file(path) as file:
        _write_padded(file, b"".join(header), alignment)
        for name, (type_name, shape, data) in tensors.items():
            content = data if isinstance(data, bytes) else data()
            if len(content) != (num_bytes := _num_bytes(shape, block_format(type_name))):
                problem = f"{len(content)} bytes; {type_name} {shape} has {num_bytes}"
                raise CheckpointError(f"{escape(path)}: tensor {escape(name, 80)}: {problem}")
            _write_padded(file, content, alignment)


def _write_padded(file: BinaryIO, data: bytes | memoryview, alignment: int) -> None:
    file.write(data)
    file.write(bytes(-len(data) % alignment))


def _pack_string(text: str) -> bytes:
    data = text.encode()
    return _U64.pack(len(data)) + data


def _pack_value(value: Any) -> bytes:
    if isinstance(value, list):
        kind = 5 if value and type(value[0]) is int else _kind(value[0] if value else "")
        packed = b"".join(_pack_one(kind, item) for item in value)
        return _U32.pack(_ARRAY) + _ARRAY_HEAD.pack(kind, len(value)) + packed
    kind = _kind(value)
    return _U32.pack(kind) + _pack_one(kind, value)


def _pack_one(kind: int, value: Any) -> bytes:
    return _pack_string(value) if kind == _STRING else struct.pack(f"<{_SCALARS[kind]}", value)


def _kind(value: Any) -> int:
    if isinstance(value, bool):
        return _BOOL
    if isinstance(value, int):
        fits = ((4, 0, 2**32), (5, -(2**31), 0), (10, 0, 2**64), (11, -(2**63), 0))
        return next(kind for kind, low, high in fits if low <= value < high)
    return 6 if isinstance(value, float) else _STRING


def _num_bytes(shape: tuple[int, ...], layout: Format) -> int:
    return math.prod(shape[:-1]) * layout.row_bytes(shape[-1])


def _align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment
