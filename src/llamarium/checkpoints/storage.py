"""The bytes of tensors in a file: looked at in place, or read into memory of their own.

A tensor that is used as it lies in the file is a view of a private mapping: nothing is copied, pages come from the
page cache when they are first touched, and writing to the tensor does not reach the file. A tensor that is changed on
its way (rows moved, blocks decoded, dtype cast, put into a larger tensor) is read instead, so that the file's pages
are not counted beside the copy.

A mapping has one danger: if the file is cut short, touching what is gone kills the process (SIGBUS). So a `TensorFile`
keeps the file's state at opening, and `check_unchanged` compares it before each request. What happens within a request
cannot be caught; `docs/guides/files-in-use.md` says how to replace a model that is in use.
"""

import math
import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from llamarium.errors import CheckpointError, escape
from llamarium.io import regular_size

Bytes = NDArray[np.uint8]

FLOATS: dict[str, DTypeLike] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
"""What a weight is stored in without being quantized, by the name that safetensors and GGUF share, and how numpy sees
it: it has no bfloat16, whose bits are kept as uint16."""


class TensorFile:
    """One file full of tensors. Offsets and lengths are the caller's to check, against `size`, in bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state = open_state(path)
        self.size = self.state.size
        self._mapping: mmap.mmap | None = None
        self._mapped: Bytes = np.empty(0, dtype=np.uint8)

    def view(self, offset: int, num_bytes: int) -> Bytes:
        """Return (num_bytes,) uint8 of the private mapping."""
        if self._mapping is None:
            with self.path.open("rb") as file:
                self._mapping = mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_COPY)
            self._mapped = np.frombuffer(self._mapping, dtype=np.uint8)
        return self._mapped[offset : offset + num_bytes]

    def load(self, offset: int, num_bytes: int) -> Bytes:
        """Return (num_bytes,) uint8 in fresh memory."""
        out = np.empty(num_bytes, dtype=np.uint8)
        left = out.data
        with self.path.open("rb", buffering=0) as file:
            file.seek(offset)
            while left:
                count = file.readinto(left)
                if not count:
                    raise CheckpointError(f"{escape(self.path)}: ended early; it changed while it was being read")
                left = left[count:]
        return out

    def array(self, offset: int, shape: tuple[int, ...], dtype: DTypeLike, *, copy: bool = False) -> NDArray[Any]:
        """Return an array of `shape` and `dtype`: in place, or in fresh memory if `copy` or badly aligned."""
        dtype = np.dtype(dtype)
        num_bytes = math.prod(shape) * dtype.itemsize
        in_place = not copy and offset % dtype.itemsize == 0
        raw = self.view(offset, num_bytes) if in_place else self.load(offset, num_bytes)
        return raw.view(dtype).reshape(shape)

    def rows(self, offset: int, num_bytes: int, shape: tuple[int, ...], type_name: str, *, copy: bool = False) -> Bytes:
        """Return a weight's bytes, (rows, bytes of a row); a vector is one row. Floats badly aligned are copied."""
        num_rows = shape[0] if len(shape) == 2 else 1
        copy = copy or offset % np.dtype(FLOATS.get(type_name, np.uint8)).itemsize != 0
        return self.array(offset, (num_rows, num_bytes // num_rows), np.uint8, copy=copy)

    def check_unchanged(self) -> None:
        """Check that what is mapped is still what was opened, as far as size, time, inode tell; else CheckpointError.

        A file that was removed, or replaced by another one under its name, is still there in the mapping.
        """
        if self._mapping is not None:
            self.state.check(self.path, self._mapping.size())


class FileState(NamedTuple):
    """What identifies a file and its content."""

    inode: tuple[int, int]
    size: int
    changed_ns: int

    @classmethod
    def of(cls, path: Path) -> "FileState | None":
        """Look at a file; None if it is gone."""
        try:
            status = os.stat(path)  # noqa: PTH116 - before each request
        except OSError:
            return None
        return cls((status.st_dev, status.st_ino), status.st_size, status.st_mtime_ns)

    def check(self, path: Path, size: int | None = None) -> None:
        """Check that a file was not written to since: that it has the `size` of the mapped one."""
        now = FileState.of(path)
        written = now is not None and now.inode == self.inode and now != self
        if written or (size is not None and size < self.size):
            raise CheckpointError(
                f"{escape(path)}: was written to while the model was in use, and weights are read from it in place; "
                "load the model anew, and next time replace the file instead (write another one, rename it)"
            )


def open_state(path: Path) -> FileState:
    """Return the state of a regular file that is about to be read."""
    regular_size(path)
    state = FileState.of(path)
    if state is None:
        raise CheckpointError(f"{escape(path)}: was removed while it was being opened")
    return state


def unpermute(rows: NDArray[Any], num_heads: int) -> NDArray[Any]:
    """Move q's or k's rows from the interleaved order of RoPE pairs to the half-split order.

    Within a head, Meta and GGUF keep the two features of pair i in rows 2i and 2i + 1; here they are in rows i and
    i + H/2. Rows move whole, so packed rows can be moved just as well.

    Args:
        rows: (heads * H, anything), any dtype.
        num_heads: N for q, K for k.

    Source: transformers' `convert_llama_weights_to_hf.py`, `permute`.
    """
    num_rows, width = rows.shape
    pairs = rows.reshape(num_heads, num_rows // num_heads // 2, 2, width)
    return pairs.swapaxes(1, 2).reshape(num_rows, width)


def equal_by_pieces(left: Bytes, right: Bytes) -> bool:
    """Compare the bytes of two tensors, stopping at the first piece that differs."""
    if left.size != right.size:
        return False
    starts: Iterable[int] = range(0, left.size, _PIECE_BYTES)
    return all(np.array_equal(left[i : i + _PIECE_BYTES], right[i : i + _PIECE_BYTES]) for i in starts)


_PIECE_BYTES = 2**24
