"""The reader of packed folders: weights on disk in tiles for the C kernels, memory-mapped.

A packed folder is a Hugging Face folder whose matrices are in tiles (see `parts_of_rows` in `quant/codes.py`). Loading
converts and copies nothing: the file is mapped, a Linear's weight is a view of it, and its pages are in the system's
page cache, which all processes on the machine share.

    config.json           Hugging Face's, with "quantization_config": {"quant_method": "llamarium"}
    model.safetensors     each packed matrix as U8 (panels, tiles, tile_bytes), everything else in floating point
      __metadata__        llamarium.version    of this layout: "1"
                          llamarium.layout     "16x32 little-endian": rows and columns of a tile, and how scales lie
                          llamarium.matrices   JSON, by tensor: {"format": "Q4_0", "rows": 2048}
                          llamarium.recipe     JSON, how the weights were made: texts by name
    and the other files of a model: generation_config.json, the tokenizer's files

A tied model has no `lm_head.weight`: its head is the embedding's tiles.

All sizes are validated when a folder is opened, because the kernels receive addresses and check nothing. Scales are
checked when the model is loaded.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from llamarium.checkpoints.checkpoint import (
    CONFIG_LIMIT_BYTES,
    FormatName,
    StoredTensor,
    TensorEntry,
    check_names,
    check_shapes,
    read_hf_config,
    select_weights,
)
from llamarium.checkpoints.huggingface.safetensors_file import SafetensorsTensor, read_safetensors_header
from llamarium.checkpoints.storage import FLOATS, TensorFile
from llamarium.config import read_json_object
from llamarium.errors import CheckpointError, UnsupportedFormatError, escape, show_value
from llamarium.file_names import CONFIG, SAFETENSORS
from llamarium.quant.formats import GROUP, PACKED_FORMATS, TILE_ROWS, PackedFormat

METHOD = "llamarium"
"""`quant_method` of a packed folder's config."""

VERSION, LAYOUT = "1", f"{TILE_ROWS}x{GROUP} little-endian"
KEYS = {name: f"llamarium.{name}" for name in ("version", "layout", "matrices", "recipe")}
_ALIGNMENT = 2  # bytes of a scale; codes need no alignment
# Names of types in folders of earlier versions.
_OLD_NAMES = {"q4": "Q4_0", "q4_min": "Q4_1", "q4_codebook": "IQ4_NL", "q8": "Q8_0"} | {
    name.lower(): name for name in ("Q4_K", "Q5_K", "Q6_K")
}
_HOW = "make the folder anew from the original model: llamarium quantize"


def is_packed_folder(path: Path) -> bool:
    """Return whether a folder's weights are packed, by its `config.json`; ConfigError if it cannot be read."""
    raw = read_json_object(path / CONFIG, CONFIG_LIMIT_BYTES).get("quantization_config")
    return isinstance(raw, dict) and cast(Mapping[str, Any], raw).get("quant_method") == METHOD


class PackedCheckpoint:
    """A Llama in a packed folder."""

    format: FormatName = "packed"

    def __init__(self, path: Path) -> None:
        self.path = path
        _, self.config, self.generation_config = read_hf_config(path)
        file = path / SAFETENSORS
        check_machine(file)
        self._tensors, metadata = read_safetensors_header(file)
        _check_layout(file, metadata)
        self.recipe = _json_object(file, metadata, "recipe")
        matrices = _json_object(file, metadata, "matrices")
        tiled = [name for name, tensor in self._tensors.items() if tensor.dtype not in FLOATS]
        check_names(file, matrices, tiled, f"those of {KEYS['matrices']}; {_HOW}")
        self._file = TensorFile(file)
        entries = {name: _entry(file, tensor, matrices.get(name)) for name, tensor in self._tensors.items()}
        self.entries: Mapping[str, TensorEntry] = select_weights(path, self.config, entries, self._is_zero)
        check_shapes(path, self.config, {key: entry.shape for key, entry in self.entries.items()})

    def stored(self, key: str, *, copy: bool = False) -> StoredTensor:
        """Return a weight's tiles or rows; see `Checkpoint.stored`."""
        entry, tensor = self.entries[key], self._tensors[key]
        if entry.is_packed:
            data = self._file.array(tensor.offset, tensor.shape, np.uint8, copy=copy)
        else:
            data = self._file.rows(tensor.offset, tensor.num_bytes, entry.shape, entry.dtype, copy=copy)
        return StoredTensor(entry.dtype, entry.shape, data)

    def _is_zero(self, entry: TensorEntry) -> bool:
        return not self._file.view(self._tensors[entry.key].offset, entry.num_bytes).any()

    def check_unchanged(self) -> None:
        """See `Checkpoint.check_unchanged`."""
        self._file.check_unchanged()


def tiles_shape(rows: int, tiles: int, format: PackedFormat) -> tuple[int, int, int]:
    """Return the shape of a matrix in tiles: panels, tiles per panel, bytes per tile."""
    return -(-rows // TILE_ROWS), tiles, format.tile_bytes


def check_machine(path: Path) -> None:
    """Check that this machine is little-endian, like packed weights; UnsupportedFormatError if not."""
    if sys.byteorder != "little":
        raise UnsupportedFormatError(
            f"{escape(path)}: packed weights are little-endian, and this machine is big-endian; take the model unpacked"
        )


def _check_layout(file: Path, metadata: Mapping[str, str]) -> None:
    for name, expected in (("version", VERSION), ("layout", LAYOUT)):
        value = metadata.get(KEYS[name])
        if value is None:
            raise _fault(file, f"{KEYS[name]} is missing")
        if value != expected:
            raise UnsupportedFormatError(
                f"{escape(file)}: {KEYS[name]} is {show_value(value)}; this version of Llamarium reads {expected!r}. "
                f"Take the version that wrote it, or {_HOW}"
            )


def _json_object(file: Path, metadata: Mapping[str, str], name: str) -> dict[str, Any]:
    try:
        value = json.loads(metadata.get(KEYS[name], ""))
    except (ValueError, RecursionError) as error:
        raise _fault(file, f"{KEYS[name]} is no JSON: {escape(error)}") from None
    if not isinstance(value, dict):
        raise _fault(file, f"{KEYS[name]} is {type(value).__name__}; expected an object")
    return cast(dict[str, Any], value)


def _entry(file: Path, tensor: SafetensorsTensor, matrix: Any) -> TensorEntry:
    """Return the entry of a tensor, with its logical shape, after validating its layout."""
    name, shape, dtype = tensor.name, tensor.shape, tensor.dtype
    if dtype not in FLOATS:
        format, rows = _matrix(file, name, matrix)
        tiles = shape[1] if len(shape) == 3 else 0
        expected = tiles_shape(rows, tiles, format)
        if dtype != "U8" or not tiles or shape != expected:
            expected_text = (*expected[:1], tiles or "tiles", *expected[2:])
            raise _fault(
                file,
                f"tensor {escape(name, 80)} is {dtype} {shape}; {rows} rows in {format.name} are "
                f"U8 ({', '.join(map(str, expected_text))})",
            )
        if tensor.offset % _ALIGNMENT:
            raise _fault(
                file, f"tensor {escape(name, 80)} begins at byte {tensor.offset}; expected a multiple of {_ALIGNMENT}"
            )
        shape, dtype = (rows, tiles * format.columns), format.name
    return TensorEntry(name, shape, dtype, tensor.num_bytes, file, name, is_packed=matrix is not None)


def _matrix(file: Path, name: str, matrix: Any) -> tuple[PackedFormat, int]:
    fields: Mapping[str, Any] = cast(Mapping[str, Any], matrix) if isinstance(matrix, dict) else {}
    format, rows = fields.get("format"), fields.get("rows")
    if not isinstance(rows, int) or isinstance(rows, bool) or rows < 1:
        raise _fault(file, f"tensor {escape(name, 80)} has {show_value(rows)} rows; expected at least 1")
    if isinstance(format, str):
        format = _OLD_NAMES.get(format, format)
    if not isinstance(format, str) or format not in PACKED_FORMATS:
        raise UnsupportedFormatError(
            f"{escape(file)}: tensor {escape(name, 80)} is packed as {show_value(format)}; known are "
            f"{', '.join(PACKED_FORMATS)}. Take a newer version of Llamarium, or {_HOW}"
        )
    return PACKED_FORMATS[format], rows


def _fault(file: Path, message: str) -> CheckpointError:
    return CheckpointError(f"{escape(file)}: {message}; the file is damaged, or written by something else: {_HOW}")
