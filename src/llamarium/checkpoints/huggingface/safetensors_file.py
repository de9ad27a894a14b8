"""The safetensors container: a JSON table of tensors, followed by their bytes without gaps. Torch-free.

    8 bytes       length of the header, little-endian
    header        {"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [begin, end]}, ...}
    data          offsets count from here

The format contains no code. The reader checks all offsets and sizes against the file's size.

Source: https://github.com/huggingface/safetensors, README, "Format".
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from llamarium.checkpoints.checkpoint import CONFIG_LIMIT_BYTES
from llamarium.checkpoints.storage import TensorFile
from llamarium.errors import CheckpointError, UnsupportedFormatError, escape
from llamarium.io import regular_size
from llamarium.strict_json import NotJson, parse_json

ITEM_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(np.uint16),
    "F8_E4M3": np.dtype(np.uint8),
    "F8_E5M2": np.dtype(np.uint8),
    "F8_E8M0": np.dtype(np.uint8),
    "C64": np.dtype(np.complex64),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.uint8),
}
"""numpy dtypes of a tensor's items, by the format's dtype name; dtypes that numpy lacks are unsigned integers."""


@dataclass(frozen=True, slots=True)
class SafetensorsTensor:
    """One row of the table.

    Attributes:
        dtype: Such as `BF16`.
        shape: Row-major.
        offset: Where the bytes begin, counted from the beginning of the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


Located = tuple[TensorFile, SafetensorsTensor]
"""A tensor of a checkpoint and the file that holds it."""


def read_safetensors(path: Path) -> dict[str, SafetensorsTensor]:
    """Read the table of a safetensors file and check it whole; see `read_safetensors_header`."""
    return read_safetensors_header(path)[0]


def read_safetensors_header(path: Path) -> tuple[dict[str, SafetensorsTensor], Mapping[str, str]]:
    """Read the table of a safetensors file, and its `__metadata__`, and check it whole.

    Raises:
        ModelNotFoundError: If there is no such file.
        CheckpointError: If the file is malformed, cut short or too long, naming the item.
        UnsupportedFormatError: For a dtype that is not known.
    """
    size = regular_size(path)
    with path.open("rb") as file:
        head = file.read(8)
        length = int.from_bytes(head, "little")
        if len(head) < 8 or length > size - 8:
            raise _fault(path, f"{size} bytes cannot hold the header of {length} bytes that is announced")
        if length > CONFIG_LIMIT_BYTES:
            raise _fault(path, f"the header has {length} bytes; expected at most {CONFIG_LIMIT_BYTES}")
        table = _parse(path, file.read(length))
    metadata = table.pop("__metadata__", None)
    if metadata is not None and not _are_texts(metadata):
        raise _fault(path, f"__metadata__ is {escape(metadata, 80)}; expected texts by name")
    tensors = {name: _tensor(path, name, row, 8 + length) for name, row in table.items()}
    _check_layout(path, tensors, 8 + length, size)
    return tensors, metadata or {}


def _fault(path: Path, message: str) -> CheckpointError:
    return CheckpointError(f"{escape(path)}: {message}; the file is damaged, was cut short, or is no safetensors file")


def _parse(path: Path, header: bytes) -> dict[str, Any]:
    try:
        table = parse_json(header)
    except NotJson as error:
        raise _fault(path, f"the header is no JSON: {escape(error)}") from None
    if not isinstance(table, dict):
        raise _fault(path, "the header is no JSON object")
    return cast(dict[str, Any], table)


def _are_texts(metadata: Any) -> bool:
    return isinstance(metadata, dict) and all(isinstance(v, str) for v in cast(dict[str, Any], metadata).values())


def _tensor(path: Path, name: str, row: Any, start: int) -> SafetensorsTensor:
    where = f"tensor {escape(name, 80)}"
    if not isinstance(row, dict) or set(cast(dict[str, Any], row)) != {"dtype", "shape", "data_offsets"}:
        raise _fault(path, f"{where} is not described by dtype, shape and data_offsets")
    fields = cast(Mapping[str, Any], row)
    dtype, shape, offsets = fields["dtype"], _sizes(fields["shape"]), _sizes(fields["data_offsets"])
    if not isinstance(dtype, str) or dtype not in ITEM_DTYPES:
        supported = ", ".join(ITEM_DTYPES)
        raise UnsupportedFormatError(f"{escape(path)}: {where} has dtype {escape(dtype, 40)}; known are {supported}")
    if shape is None or offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        actual = escape(f"shape {fields['shape']} and data_offsets {fields['data_offsets']}", 120)
        raise _fault(path, f"{where} has {actual}; expected sizes, and a begin not after its end")
    num_bytes = math.prod(shape) * ITEM_DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != num_bytes:
        raise _fault(path, f"{where} has {offsets[1] - offsets[0]} bytes; {dtype} {shape} is {num_bytes}")
    return SafetensorsTensor(name, dtype, shape, start + offsets[0], num_bytes)


def _sizes(value: Any) -> tuple[int, ...] | None:
    """Return a list of sizes as a tuple; None if it is none. Sixteen dimensions bound what a product costs."""
    if not isinstance(value, list):
        return None
    items = cast(list[Any], value)
    is_valid = len(items) <= 16 and all(
        isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 2**63 for n in items
    )
    return tuple(items) if is_valid else None


def _check_layout(path: Path, tensors: Mapping[str, SafetensorsTensor], start: int, size: int) -> None:
    """Check that the tensors cover the data exactly: no overlap, no gap, nothing left over."""
    end = start
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.num_bytes)):
        if tensor.offset != end:
            problem = "overlaps the tensor before it" if tensor.offset < end else "leaves a gap"
            raise _fault(path, f"tensor {escape(tensor.name, 80)} {problem}: begins at {tensor.offset}, expected {end}")
        end += tensor.num_bytes
    if end != size:
        raise _fault(path, f"the tensors end at {end}, the file at {size}")
