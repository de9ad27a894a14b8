"""Packing of a GGUF file's blocks into tiles for the C kernels, in background threads.

Each thread reads a piece of the file, packs it, and takes the next piece of any weight. Weights are in memory only
once, all cores are busy until the end, and Python can build the tokenizer meanwhile.
"""

import math
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from ctypes import c_int64, pointer
from itertools import accumulate
from pathlib import Path
from typing import Self

import numpy as np

from llamarium.checkpoints.checkpoint import TensorEntry
from llamarium.checkpoints.gguf.reader import GGUFCheckpoint
from llamarium.errors import CheckpointError, escape
from llamarium.kernels import native, structs
from llamarium.kernels.memory import reserve
from llamarium.kernels.threads import num_threads
from llamarium.quant.formats import PACKED_FORMATS, TILE_ROWS
from llamarium.runtime.native.weights import Weight
from llamarium.system import file_number

_ALIGNMENT = 4096
_END = 2**62
_PAUSE_S = 0.02


class FilePacking:
    """A packing in progress; leaving the context stops it.

    Attributes:
        weights: Weights by key; their tiles are complete after `wait`.
    """

    def __init__(self, checkpoint: GGUFCheckpoint, keys: Iterable[str]) -> None:
        """Allocate the tiles of weights whose types are in `PACKED_FORMATS`, and start to fill them."""
        self._path = checkpoint.path
        self._open_files = ExitStack()
        self.weights = _empty_weights(checkpoint, keys)
        self._num_nonfinite = {key: c_int64() for key in self.weights}
        self._state = structs.CPacking()
        self._pool = ThreadPoolExecutor(num_threads())
        try:
            self._matrices = self._places(checkpoint)
        except OSError as error:
            self._open_files.close()
            raise CheckpointError(f"{escape(self._path)}: cannot be read: {escape(error)}") from None
        calls = range(num_threads()) if self.weights else ()
        self._calls = [self._pool.submit(native.pack_files, self._matrices, self._state) for _ in calls]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._state.next = _END
        self._pool.shutdown()
        self._open_files.close()

    def wait(self, tell: Callable[[int], None]) -> None:
        """Wait until all tiles are complete; `tell` is called repeatedly with the bytes read so far.

        Raises:
            CheckpointError: If a file ends early.
            MemoryBudgetError: If there is not enough memory for buffers.
        """
        waiting = set(self._calls)
        while waiting:
            done, waiting = wait(waiting, timeout=_PAUSE_S)
            if not all(call.result() for call in done):
                raise CheckpointError(f"{escape(self._path)}: ended early; it changed while it was being read")
            tell(self._state.num_bytes)

    def num_nonfinite(self, key: str) -> int:
        """Return the number of NaN or infinite values of a weight."""
        return self._num_nonfinite[key].value

    def _places(self, checkpoint: GGUFCheckpoint) -> structs.FileMatrices:
        files = dict[Path, int]()
        matrices = (structs.CFileMatrix * len(self.weights))()
        for matrix, (key, weight) in zip(matrices, self.weights.items(), strict=True):
            place = checkpoint.place(key)
            if place.path not in files:
                file = self._open_files.enter_context(place.path.open("rb", buffering=0))
                files[place.path] = file_number(file.fileno())
            matrix.kind, (matrix.rows, matrix.cols) = structs.Kind[weight.type_name], weight.shape
            matrix.head_rows, matrix.file, matrix.offset = place.head_rows, files[place.path], place.offset
            matrix.tiles, matrix.num_nonfinite = weight.data.ctypes.data, pointer(self._num_nonfinite[key])
        return matrices


def _empty_weights(checkpoint: GGUFCheckpoint, keys: Iterable[str]) -> dict[str, Weight]:
    """Return weights whose tiles lie one behind the other, in huge pages where the system grants them."""
    entries = [checkpoint.entries[key] for key in keys]
    ends = [0, *accumulate(-(-_num_tile_bytes(entry) // _ALIGNMENT) * _ALIGNMENT for entry in entries)]
    memory = reserve((ends[-1],), np.uint8, huge_pages=True)
    return {
        entry.key: Weight(
            entry.key, entry.dtype, entry.shape,
            memory[start : start + _num_tile_bytes(entry)].reshape(_tile_shape(entry)),
        )
        for entry, start in zip(entries, ends, strict=False)
    }  # fmt: skip


def _tile_shape(entry: TensorEntry) -> tuple[int, int, int]:
    num_rows, columns = entry.shape
    format = PACKED_FORMATS[entry.dtype]
    return -(-num_rows // TILE_ROWS), columns // format.columns, format.tile_bytes


def _num_tile_bytes(entry: TensorEntry) -> int:
    return math.prod(_tile_shape(entry))
