"""The zip archive that `torch.save` writes: which records it has, and where their bytes lie in the file.

    name/data.pkl      a pickle: tensors by name, their shapes, and which record has their numbers
    name/byteorder     "little" (files of torch before 2.1 have none)
    name/data/0, ...   the numbers, stored as they are

A record must be stored, not compressed, so that it is as long as in the file; and no two may share bytes.

Source: torch, `serialization.py`, `_save`; PKWARE's APPNOTE.TXT, 4.3 and 4.4.
"""

import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from llamarium.errors import CheckpointError, UnsupportedFormatError, escape
from llamarium.io import regular_size

_PICKLE_LIMIT_BYTES = 2**20  # 405B's 1,100 tensors take a quarter of it
_DIRECTORY_LIMIT_BYTES = 2**21

_END = struct.Struct("<4s4H2IH")  # signature, four counts, size and offset of the directory, length of a comment
_END64 = struct.Struct("<4sQ2H2I4Q")  # the same with 64 bits; its locator of 20 bytes stands between the two
_LOCATOR_BYTES = 20
_LOCAL = struct.Struct("<4s5H3I2H")  # before a record: signature, ..., lengths of the name and the extra field
_ENCRYPTED = 1


@dataclass(frozen=True, slots=True)
class Record:
    """Where a record's bytes lie in the file."""

    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Archive:
    """An archive, checked.

    Attributes:
        program: The pickle.
        storages: The records of numbers, by the key that the pickle has for them.
        num_bytes: The file's size.
    """

    path: Path
    program: bytes
    storages: Mapping[str, Record]
    num_bytes: int


def read_archive(path: Path) -> Archive:
    """Read the directory and the pickle of a file that `torch.save` wrote.

    Raises:
        ModelNotFoundError: If there is no such file.
        CheckpointError: If it is not such an archive, is compressed, encrypted, damaged, or its records overlap.
        UnsupportedFormatError: For the layout of torch before 1.6, and for big-endian numbers.
    """
    size = regular_size(path)
    with path.open("rb") as file:
        start = _check_ends(path, file, size)
        infos = _read_directory(path, file, size)
        records = {info.filename: _locate(path, file, info) for info in infos}
        _check_overlaps(path, records, start)

        pickles = [name for name in records if name.endswith(".pkl")]
        if len(pickles) != 1 or not pickles[0].endswith("/data.pkl"):
            raise fault(path, f"the archive has {len(pickles)} pickles; expected one, data.pkl")
        prefix = pickles[0].removesuffix("data.pkl")
        program = _read(file, records[pickles[0]])
        order = records.get(f"{prefix}byteorder")
        if order is not None and order.num_bytes < 16 and _read(file, order).strip() != b"little":
            raise UnsupportedFormatError(f"{escape(path)}: has big-endian numbers; save it on a little-endian machine")

    data = f"{prefix}data/"
    storages = {name.removeprefix(data): record for name, record in records.items() if name.startswith(data)}
    return Archive(path, program, storages, size)


def fault(path: Path, message: str) -> CheckpointError:
    """Return the error for a file that is not such an archive."""
    return CheckpointError(f"{escape(path)}: {message}; expected tensors by name, as torch.save writes them")


def _read(file: BinaryIO, record: Record) -> bytes:
    file.seek(record.offset)
    return file.read(record.num_bytes)


def _check_ends(path: Path, file: BinaryIO, size: int) -> int:
    """Check that the archive begins and ends with the file, so that all readers see the same, small directory.

    Returns:
        Where the directory begins, which all records end before.
    """
    magic = file.read(4)
    file.seek(max(0, size - _END.size - _LOCATOR_BYTES - _END64.size))
    tail = file.read()
    if magic[:1] == b"\x80":
        raise UnsupportedFormatError(
            f"{escape(path)}: is a bare pickle, the layout of torch before 1.6; save it again, with "
            "torch.save(torch.load(path, weights_only=True), path), or use the model's safetensors"
        )
    if magic != b"PK\3\4" or len(tail) < _END.size or tail[-_END.size :][:4] != b"PK\5\6":
        raise fault(path, "no zip archive, or one that was cut short or extended")
    end = _END.unpack(tail[-_END.size :])
    length, offset, last = end[5], end[6], size - _END.size
    tail64 = tail[: -_END.size - _LOCATOR_BYTES]
    if tail64[:4] == b"PK\6\6" and len(tail64) == _END64.size:
        length, offset = _END64.unpack(tail64)[8:10]
        last -= _LOCATOR_BYTES + _END64.size
    if length > _DIRECTORY_LIMIT_BYTES or offset + length != last:
        raise fault(path, f"the archive's directory of {length} bytes at {offset} does not end it at {last}")
    return offset


def _read_directory(path: Path, file: BinaryIO, size: int) -> list[zipfile.ZipInfo]:
    try:
        infos = zipfile.ZipFile(file).infolist()
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, EOFError, struct.error) as error:
        raise fault(path, f"no readable zip archive: {escape(error)}") from None
    if len({info.filename for info in infos}) != len(infos):
        raise fault(path, "a record of the archive is there twice")
    for info in infos:
        if info.compress_type or info.flag_bits & _ENCRYPTED or info.file_size != info.compress_size:
            raise fault(path, f"record {escape(info.filename, 80)} is compressed or encrypted")
        if info.file_size > size:
            raise fault(path, f"record {escape(info.filename, 80)} is larger than the file")
        if info.filename.endswith(".pkl") and info.file_size > _PICKLE_LIMIT_BYTES:
            raise fault(path, f"the pickle has {info.file_size} bytes, above {_PICKLE_LIMIT_BYTES}")
    return infos


def _locate(path: Path, file: BinaryIO, info: zipfile.ZipInfo) -> Record:
    """Return where a record's bytes begin: after its own header, which must be there and have the same name."""
    name = escape(info.filename, 80)
    if info.header_offset < 0:
        raise fault(path, f"record {name} begins before the file")
    file.seek(info.header_offset)
    header = file.read(_LOCAL.size)
    if len(header) < _LOCAL.size or header[:4] != b"PK\3\4":
        raise fault(path, f"record {name} has no header at {info.header_offset}")
    _, _, flags, method, *_, name_bytes, extra_bytes = _LOCAL.unpack(header)
    encoding = "utf-8" if flags & 0x800 else "cp437"
    if file.read(name_bytes).decode(encoding, "replace") != info.orig_filename or method or flags & _ENCRYPTED:
        raise fault(path, f"record {name} differs from the header before it")
    return Record(info.header_offset + _LOCAL.size + name_bytes + extra_bytes, info.file_size)


def _check_overlaps(path: Path, records: Mapping[str, Record], end: int) -> None:
    """Check that records neither share bytes nor reach into the directory, which begins at `end`."""
    before = 0
    for name, record in sorted(records.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
        if record.offset < before or record.offset + record.num_bytes > end:
            raise fault(path, f"record {escape(name, 80)} overlaps the one before it or the directory")
        before = record.offset + record.num_bytes
