"""The tensors of a file that `torch.save` wrote, as what safetensors has: a name, dtype, shape, and bytes in a file.

A tensor of torch is a view of a storage: a first item, a shape and strides. Almost all that are saved lie row by row,
so they are used where they are. Others (transposed ones, float64) are copied into rows when they are read.

What a tensor claims is compared with the bytes of its storage before anything is allocated; one that has more items
than its storage, as an expanded one has, is refused. Tied weights share their bytes: apart from one such weight, the
tensors together are no larger than the file.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import DTypeLike

from llamarium.checkpoints.checkpoint import list_some
from llamarium.checkpoints.huggingface.safetensors_file import ITEM_DTYPES, Located, SafetensorsTensor
from llamarium.checkpoints.pytorch.archive import Archive, fault, read_archive
from llamarium.checkpoints.pytorch.program import TensorView, run_program
from llamarium.checkpoints.storage import Bytes, TensorFile
from llamarium.errors import CheckpointError, counted, escape, warn_caller

_MOST_DIMS = 16


class RowsOf(TensorFile):
    """One tensor of a file, seen as a file of its own: its items row by row, float64 rounded to float32."""

    def __init__(
        self, file: TensorFile, start: int, items: DTypeLike, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> None:
        """Describe the tensor: where its first item is in `file`, the items' type, and strides in items."""
        self._file, self._start = file, start
        self._items, self._shape, self._strides = np.dtype(items), shape, strides
        self.path, self.state = file.path, file.state
        self.size = math.prod(shape) * min(4, self._items.itemsize)

    def view(self, offset: int, num_bytes: int) -> Bytes:
        """Return (num_bytes,) uint8 in fresh memory; see `TensorFile.view`."""
        return self._rows()[offset : offset + num_bytes]

    def load(self, offset: int, num_bytes: int) -> Bytes:
        """Return (num_bytes,) uint8 in fresh memory."""
        return self.view(offset, num_bytes)

    def check_unchanged(self) -> None:
        """Check that the file is still what was opened; see `TensorFile.check_unchanged`."""
        self._file.check_unchanged()

    def _rows(self) -> Bytes:
        size = self._items.itemsize
        if self.size == 0:
            return np.empty(0, np.uint8)
        reach = 1 + sum((n - 1) * stride for n, stride in zip(self._shape, self._strides, strict=True))
        items = np.frombuffer(self._file.view(self._start, reach * size), self._items)
        strided = np.lib.stride_tricks.as_strided(
            items, self._shape, [stride * size for stride in self._strides], writeable=False
        )
        if size == 8:
            with np.errstate(over="ignore"):  # what becomes infinite is reported when weights are checked
                strided = strided.astype(np.float32)
        return np.array(strided, order="C").reshape(-1).view(np.uint8)  # a copy, whatever the layout was


def in_float32(file: TensorFile, tensor: SafetensorsTensor) -> Located:
    """Return a float64 tensor that lies row by row as one of float32."""
    strides = tuple(math.prod(tensor.shape[i + 1 :]) for i in range(len(tensor.shape)))
    rows = RowsOf(file, tensor.offset, ITEM_DTYPES["F64"], tensor.shape, strides)
    return rows, SafetensorsTensor(tensor.name, "F32", tensor.shape, 0, rows.size)


def read_torch_file(path: Path) -> dict[str, Located]:
    """Return the tensors of a file that `torch.save` wrote, by name, each with the file that it is to be read from.

    Values that are not tensors are named in a warning.

    Raises:
        ModelNotFoundError: If there is no such file.
        CheckpointError: If it is malformed, or its pickle needs anything but plain tensors; nothing of it is run.
        UnsupportedFormatError: For the layout of torch before 1.6, and for big-endian numbers.
    """
    archive = read_archive(path)
    loaded = run_program(path, archive.program)
    if not isinstance(loaded, dict):
        raise fault(path, f"holds a {type(loaded).__name__}, not tensors by name")
    file = TensorFile(path)
    tensors: dict[str, Located] = {}
    views: dict[str, TensorView] = {}
    others: list[str] = []
    for name, value in cast(Mapping[Any, Any], loaded).items():
        if isinstance(value, TensorView) and isinstance(name, str):
            tensors[name] = _tensor(archive, file, name, value)
            views[name] = value
        else:
            item = name if isinstance(name, str) else f"a {type(name).__name__}"
            others.append(f"{item} ({type(value).__name__})")
    if not tensors:
        raise fault(path, f"holds no tensors by name; its items are {list_some(others) or 'none'}")
    _check_total(archive, views)
    if others:
        warn_caller(f"{escape(path)}: items that are not tensors are ignored: {list_some(others)}")
    return tensors


def _tensor(archive: Archive, file: TensorFile, name: str, view: TensorView) -> Located:
    """Check a tensor against its storage's bytes, and return where it lies."""
    where, storage = f"tensor {escape(name, 80)}", view.storage
    record = archive.storages.get(storage.key)
    if record is None:
        raise fault(archive.path, f"{where} is in record data/{escape(storage.key, 40)}, which is missing")
    items = ITEM_DTYPES[storage.dtype]
    _check_view(archive.path, where, view)
    if storage.num_items * items.itemsize > record.num_bytes:
        raise fault(
            archive.path,
            f"{where} is in a storage of {counted(storage.num_items, 'item')} of {items.itemsize} "
            "bytes, and its record has "
            f"{counted(record.num_bytes, 'byte')}",
        )

    start = record.offset + view.offset * items.itemsize
    num_items = math.prod(view.shape)
    if view.strides == _row_strides(view) and storage.dtype != "F64":
        num_bytes = num_items * items.itemsize
        return file, SafetensorsTensor(name, storage.dtype, view.shape, start, num_bytes)
    dtype = "F32" if storage.dtype == "F64" else storage.dtype
    rows = RowsOf(file, start, items, view.shape, view.strides)
    return rows, SafetensorsTensor(name, dtype, view.shape, 0, rows.size)


def _check_view(path: Path, where: str, view: TensorView) -> None:
    """Check that a view's items are all in its storage, and not more than there are."""
    sizes = (view.storage.num_items, view.offset, *view.shape, *view.strides)
    if len(view.shape) != len(view.strides) or len(view.shape) > _MOST_DIMS or not all(map(_is_size, sizes)):
        raise fault(path, f"{where} has a storage, shape, strides or offset that are not sizes")
    num_items = math.prod(view.shape)
    reach = view.offset + sum((n - 1) * stride for n, stride in zip(view.shape, view.strides, strict=True))
    if num_items and (reach >= view.storage.num_items or num_items > view.storage.num_items):
        raise fault(
            path,
            f"{where} has shape {view.shape} and strides {view.strides} from item {view.offset} on, and its storage "
            f"has {counted(view.storage.num_items, 'item')}",
        )


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _row_strides(view: TensorView) -> tuple[int, ...]:
    """Return the strides with which a view's items would lie row by row; those of one item or none are as they are."""
    strides, step = list(view.strides), 1
    for i in range(len(view.shape) - 1, -1, -1):
        if view.shape[i] != 1 and 0 not in view.shape:
            strides[i] = step
        step *= view.shape[i]
    return tuple(strides)


def _check_total(archive: Archive, views: Mapping[str, TensorView]) -> None:
    """Check that tensors are no larger than the file together, apart from one weight that another is tied to."""
    total, largest_tied, starts = 0, 0, set[tuple[str, int]]()
    for view in views.values():
        num_bytes = math.prod(view.shape) * ITEM_DTYPES[view.storage.dtype].itemsize
        total += num_bytes
        if (view.storage.key, view.offset) in starts:
            largest_tied = max(largest_tied, num_bytes)
        starts.add((view.storage.key, view.offset))
    if total - largest_tied > archive.num_bytes:
        raise CheckpointError(
            f"{escape(archive.path)}: its tensors share bytes and take {total} bytes together, more than the file's "
            f"{archive.num_bytes}; expected that of the weights only a tied head shares its bytes"
        )
