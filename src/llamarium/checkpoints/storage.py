"""Access to the bytes of tensors in a file: memory-mapped, or read into newly allocated memory.

A tensor that is used exactly as stored is a view of a private mapping: nothing is copied, pages come from the page
cache when they are first accessed, and writing to the tensor does not change the file. A tensor that is converted
while loading (rows permuted, blocks decoded, dtype cast, copied into a larger tensor) is read instead, so that the
mapped pages do not take memory in addition to the copy.

A mapping has one risk: if the file is truncated, accessing the missing pages kills the process (SIGBUS). Therefore a
`TensorFile` records the file's state when it is opened, and `check_unchanged` compares it before each request. A change
during a request cannot be caught; `docs/guides/files-in-use.md` explains how to replace a model that is in use.
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
"""numpy dtypes of floating-point weights, by their name in safetensors and GGUF files.

numpy has no bfloat16; its bits are kept as uint16."""


class TensorFile:
    """A file of tensors. Callers must check offsets and lengths against `size`, all in bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state = open_state(path)
        self.size = self.state.size
        self._mapping: mmap.mmap | None = None
        self._mapped: Bytes = np.empty(0, dtype=np.uint8)

    def view(self, offset: int, num_bytes: int) -> Bytes:
        """Return a view of the private mapping, uint8 (num_bytes,)."""
        if self._mapping is None:
            with self.path.open("rb") as file:
                self._mapping = mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_COPY)
            self._mapped = np.frombuffer(self._mapping, dtype=np.uint8)
        return self._mapped[offset : offset + num_bytes]

    def load(self, offset: int, num_bytes: int) -> Bytes:
        """Read bytes into newly allocated memory, uint8 (num_bytes,); CheckpointError if the file ends early."""
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
        """Return an array: a view of the mapping, or a copy if `copy` is set or the offset is not aligned."""
        dtype = np.dtype(dtype)
        num_bytes = math.prod(shape) * dtype.itemsize
        in_place = not copy and offset % dtype.itemsize == 0
        raw = self.view(offset, num_bytes) if in_place else self.load(offset, num_bytes)
        return raw.view(dtype).reshape(shape)

    def rows(self, offset: int, num_bytes: int, shape: tuple[int, ...], type_name: str, *, copy: bool = False) -> Bytes:
        """Return a weight's bytes, (rows, bytes per row); a vector is one row. Unaligned floats are copied."""
        num_rows = shape[0] if len(shape) == 2 else 1
        copy = copy or offset % np.dtype(FLOATS.get(type_name, np.uint8)).itemsize != 0
        return self.array(offset, (num_rows, num_bytes // num_rows), np.uint8, copy=copy)

    def check_unchanged(self) -> None:
        """Check by size, modification time and inode that a mapped file was not modified; CheckpointError if it was.

        A file that was deleted, or replaced by renaming another one over it, is still intact in the mapping.
        """
        if self._mapping is not None:
            self.state.check(self.path, self._mapping.size())


class FileState(NamedTuple):
    """The identity, size and modification time of a file.

    Attributes:
        inode: Device and inode number.
        size: Size in bytes.
        changed_ns: Modification time, in nanoseconds.
    """

    inode: tuple[int, int]
    size: int
    changed_ns: int

    @classmethod
    def of(cls, path: Path) -> "FileState | None":
        """Return the current state of a file; None if it does not exist."""
        try:
            status = os.stat(path)  # noqa: PTH116 - faster than Path.stat, and called before each request
        except OSError:
            return None
        return cls((status.st_dev, status.st_ino), status.st_size, status.st_mtime_ns)

    def check(self, path: Path, size: int | None = None) -> None:
        """Check that a file was not modified since; CheckpointError if it was.

        `size` is the current size of the mapped file, which reveals truncation even if the path has been replaced.
        """
        current = FileState.of(path)
        written = current is not None and current.inode == self.inode and current != self
        if written or (size is not None and size < self.size):
            raise CheckpointError(
                f"{escape(path)}: was written to while the model was in use, and weights are read from it in place; "
                "load the model anew, and next time replace the file instead (write another one, rename it)"
            )


def open_state(path: Path) -> FileState:
    """Return the state of a regular file, before it is read."""
    regular_size(path)
    state = FileState.of(path)
    if state is None:
        raise CheckpointError(f"{escape(path)}: was removed while it was being opened")
    return state


def unpermute(rows: NDArray[Any], num_heads: int) -> NDArray[Any]:
    """Permute the rows of q or k from interleaved to half-split RoPE order.

    Within a head, Meta and GGUF keep the two features of pair i in rows 2i and 2i + 1; here they are in rows i and
    i + H/2. Only whole rows move, so rows of quantized blocks can be permuted too.

    Args:
        rows: (heads * H, any width), any dtype.
        num_heads: N for q, K for k.

    Source: transformers' `convert_llama_weights_to_hf.py`, `permute`.
    """
    num_rows, width = rows.shape
    pairs = rows.reshape(num_heads, num_rows // num_heads // 2, 2, width)
    return pairs.swapaxes(1, 2).reshape(num_rows, width)


def equal_by_pieces(left: Bytes, right: Bytes) -> bool:
    """Return whether two tensors have the same bytes; stops at the first piece that differs."""
    if left.size != right.size:
        return False
    starts: Iterable[int] = range(0, left.size, _PIECE_BYTES)
    return all(np.array_equal(left[i : i + _PIECE_BYTES], right[i : i + _PIECE_BYTES]) for i in starts)


_PIECE_BYTES = 2**24
