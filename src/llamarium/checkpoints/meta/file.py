"""Meta's `consolidated.NN.pth`: a zip archive with a pickle in it, opened so that it can do nothing but hold tensors.

A pickle is a program. Three things stand between it and this process: the archive must be plainly stored and its
pickle small; every name that the pickle imports must be one of the few that a dictionary of tensors needs, which is
looked up without running anything; and then `torch.load(weights_only=True)` runs it in torch's own interpreter, which
has no other names either. There is no second attempt with fewer checks.

Source: `torch/serialization.py` (layout of the archive), `torch/_weights_only_unpickler.py`.
"""

import pickletools
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llamarium.errors import CheckpointError, OptionError, UnsupportedFormatError, escape
from llamarium.io import regular_size

_MIN_TORCH = (2, 10)  # earlier ones had holes in weights_only: CVE-2025-32434, CVE-2026-24747
_PICKLE_LIMIT_BYTES = 2**20  # 405B's 1,100 tensors take a quarter of it
_DIRECTORY_LIMIT_BYTES = 2**21

_ALLOWED_NAMES = frozenset(
    {
        "collections OrderedDict",
        "torch._utils _rebuild_tensor_v2",
        "torch BFloat16Storage",
        "torch HalfStorage",
        "torch FloatStorage",
    }
)


_BITS = {torch.float32: (torch.float32, np.float32), torch.float16: (torch.float16, np.float16)} | {
    torch.bfloat16: (torch.int16, np.uint16)
}
"""How each dtype is handed to numpy, and seen there (`storage.FLOATS`)."""


def read_meta_shard(path: Path) -> dict[str, NDArray[Any]]:
    """Return the tensors of one shard by name, as views of a private mapping of the file; bfloat16 as its bits."""
    _check_torch_version(path)
    size = regular_size(path)
    _check_names(path, _read_pickle(path, size))
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # noqa: BLE001 - a damaged pickle can raise anything; none of it is ours
        raise _fault(path, f"torch cannot load it: {escape(type(error).__name__)}: {escape(error)}") from None
    return _check_tensors(path, loaded, size)


def _fault(path: Path, message: str) -> CheckpointError:
    return CheckpointError(f"{escape(path)}: {message}; expected a checkpoint as Meta publishes it")


def _check_torch_version(path: Path) -> None:
    found = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if found < _MIN_TORCH:
        needed = ".".join(map(str, _MIN_TORCH))
        raise OptionError(
            f"{escape(path)}: a .pth file is a pickle, and torch {torch.__version__} does not read those safely; "
            f"install torch {needed} or newer, or use the model's safetensors"
        )


def _read_pickle(path: Path, size: int) -> bytes:
    """Return the archive's one pickle, after checking that the archive is what `torch.save` writes."""
    _check_directory(path, size)
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
            names = {record.filename for record in records}
            pickles = [record for record in records if record.filename.endswith(".pkl")]
            if len(names) != len(records):
                raise _fault(path, "a record of the archive is there twice")
            if any(r.compress_type or r.file_size != r.compress_size or r.file_size > size for r in records):
                raise _fault(path, "the archive is compressed, or a record is larger than the file")
            if len(pickles) != 1 or not pickles[0].filename.endswith("/data.pkl"):
                raise _fault(path, f"the archive has {len(pickles)} pickles; expected one, data.pkl")
            if pickles[0].file_size > _PICKLE_LIMIT_BYTES:
                raise _fault(path, f"the pickle has {pickles[0].file_size} bytes, above {_PICKLE_LIMIT_BYTES}")
            return archive.read(pickles[0])
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, EOFError, struct.error) as error:
        raise _fault(path, f"no readable zip archive: {escape(error)}") from None


_END = struct.Struct("<4s4H2IH")  # signature, four counts, size and offset of the directory, length of a comment
_END64 = struct.Struct("<4sQ2H2I4Q")  # the same with 64 bits; its locator of 20 bytes stands between the two
_LOCATOR_BYTES = 20


def _check_directory(path: Path, size: int) -> None:
    """Check that the archive begins and ends with the file, so that all readers see the same, small directory."""
    with path.open("rb") as file:
        magic = file.read(4)
        file.seek(max(0, size - _END.size - _LOCATOR_BYTES - _END64.size))
        tail = file.read()
    if magic != b"PK\3\4" or len(tail) < _END.size or tail[-_END.size :][:4] != b"PK\5\6":
        raise _fault(path, "no zip archive, or one that was cut short or extended (old .pth files are bare pickles)")
    end = _END.unpack(tail[-_END.size :])
    length, offset, last = end[5], end[6], size - _END.size
    tail64 = tail[: -_END.size - _LOCATOR_BYTES]
    if tail64[:4] == b"PK\6\6" and len(tail64) == _END64.size:
        length, offset = _END64.unpack(tail64)[8:10]
        last -= _LOCATOR_BYTES + _END64.size
    if length > _DIRECTORY_LIMIT_BYTES or offset + length != last:
        raise _fault(path, f"the archive's directory of {length} bytes at {offset} does not end it at {last}")


def _check_names(path: Path, program: bytes) -> None:
    """Check what the pickle imports, without running it."""
    try:
        for opcode, argument, _ in pickletools.genops(program):
            foreign = opcode.name == "GLOBAL" and argument not in _ALLOWED_NAMES
            if foreign or opcode.name in ("STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4"):
                raise _fault(path, f"its pickle names {escape(argument or opcode.name, 80)!r}, which is no tensor")
    except (ValueError, IndexError, UnicodeDecodeError) as error:
        raise _fault(path, f"its pickle is damaged: {escape(error)}") from None


def _check_tensors(path: Path, loaded: Any, size: int) -> dict[str, NDArray[Any]]:
    if not isinstance(loaded, dict):
        raise _fault(path, f"holds a {type(loaded).__name__}, not tensors by name")
    found: dict[str, NDArray[Any]] = {}
    for name, value in cast(Mapping[Any, Any], loaded).items():
        if not isinstance(name, str) or not isinstance(value, Tensor) or value.layout != torch.strided:
            raise _fault(path, f"{escape(name, 80)} is a {type(value).__name__}, not a tensor by name")
        if value.device.type != "cpu" or not value.is_contiguous():
            raise _fault(path, f"tensor {escape(name, 80)} is not laid out row by row")
        if value.is_neg() or value.is_conj():  # numbers that are not what their bytes say
            raise _fault(path, f"tensor {escape(name, 80)} is a view with torch's negative or conjugate bit")
        if value.dtype not in _BITS:
            raise UnsupportedFormatError(
                f"{escape(path)}: tensor {escape(name, 80)} is {value.dtype}; expected a plain float"
            )
        bits, seen = _BITS[value.dtype]
        found[name] = value.detach().view(bits).numpy().view(seen)
    if sum(value.nbytes for value in found.values()) > size:
        raise _fault(path, f"its tensors are larger than the file's {size} bytes")
    return found
