"""A packed folder: weights on disk in the order in which a CPU uses them, looked at in place.

It is a Hugging Face folder whose matrices are tiles (`quant/tiles.py` draws them). Loading one converts nothing and
copies nothing: the file is mapped, a Linear's weight is a view of it, and the pages are those of the system's cache, so
that every process on the machine shares them.

    config.json           Hugging Face's, with "quantization_config": {"quant_method": "llamarium"}
    model.safetensors     each packed matrix as U8 (stripes, tiles, tile_bytes), everything else in floating point
      __metadata__        llamarium.version    of this layout: "1"
                          llamarium.layout     "16x32 little-endian": rows and columns of a tile, and how scales lie
                          llamarium.matrices   JSON, by tensor: {"format": "q4", "rows": 2048}
                          llamarium.recipe     JSON, how the weights were made: texts by name
    and what else a model has: generation_config.json, the tokenizer's files

A tied model has no `lm_head.weight`: its head is the embedding's tiles.

Everything is held against everything else when a folder is opened, because the kernels, which get addresses, check
nothing. Scales are looked at when the model is loaded.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from llamarium.checkpoints.checkpoint import FormatName, PackedTensor, TensorEntry, check_names, check_weights
from llamarium.checkpoints.huggingface.safetensors_file import (
    HEADER_LIMIT_BYTES,
    SafetensorsTensor,
    read_safetensors_header,
)
from llamarium.checkpoints.save import Weight, complete_folder, write_safetensors
from llamarium.checkpoints.storage import FLOAT_DTYPES, TensorFile, check_out
from llamarium.config import ModelConfig, read_json_object
from llamarium.errors import CheckpointError, OptionError, UnsupportedFormatError, escape, show_value
from llamarium.quant.packed import FORMATS, GROUP, TILE_ROWS, LinearPacked, PackedFormat
from llamarium.tokenizer.base import Tokenizer

METHOD = "llamarium"
"""`quant_method` of a packed folder's config."""

_FILE = "model.safetensors"
_VERSION, _LAYOUT = "1", f"{TILE_ROWS}x{GROUP} little-endian"
_KEYS = {name: f"llamarium.{name}" for name in ("version", "layout", "matrices", "recipe")}
_ALIGNMENT = 2  # bytes of a scale; the kernels read codes from anywhere
_HOW = "make the folder anew from the original model: llamarium quantize"


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight that is about to be written.

    Attributes:
        key: Its state-dict key.
        shape: Its logical shape, (out, in), or a norm's (hidden,).
        format: Its format's name in `FORMATS`; None for a tensor that stays in floating point.
        read: Makes tiles or, without a format, values. Called once: for tiles when it is their turn to be written, so
            that nothing holds two models; for values at the beginning, as the file's head says what type they are.
    """

    key: str
    shape: tuple[int, int] | tuple[int]
    format: str | None
    read: Callable[[], LinearPacked | Tensor]


# --- writing ----------------------------------------------------------------------------------------------------------


def save_packed(
    weights: Sequence[PackedWeight],
    config: ModelConfig,
    folder: Path,
    *,
    tokenizer: Tokenizer | None = None,
    generation_config: Mapping[str, Any] | None = None,
    recipe: Mapping[str, str],
) -> None:
    """Write a packed folder, synced to disk.

    Args:
        weights: Exactly those that `config` asks for, in the order of writing.
        config: The model's.
        folder: Made if missing; must hold no model.
        tokenizer: Written beside the weights.
        generation_config: The content of `generation_config.json`; the config's BOS and EOS are added to it.
        recipe: How the weights were made, for whoever wonders later: {"matrices": "q4", "scales": "fitted", ...}.

    Raises:
        CheckpointError: If weights and config disagree, a scale is NaN or infinite, or the tokenizer is too large.
        OptionError: For a format or a dtype that is not written.
        OutputError: If the folder holds a model already, or cannot be written.
        UnsupportedFormatError: On a machine that keeps numbers with the big end first.
    """
    _check_machine(folder)
    check_weights(folder, config, {weight.key: weight.shape for weight in weights})
    metadata = {
        "format": "pt",
        _KEYS["version"]: _VERSION,
        _KEYS["layout"]: _LAYOUT,
        _KEYS["matrices"]: _json({w.key: {"format": w.format, "rows": w.shape[0]} for w in weights if w.format}),
        _KEYS["recipe"]: _json(recipe),
    }
    fields = {**config.to_hf(), "dtype": "bfloat16", "torch_dtype": "bfloat16"}
    fields["quantization_config"] = {"quant_method": METHOD}
    stored = list(map(_stored, weights))
    with complete_folder(folder, config, fields, tokenizer, generation_config or {}):
        write_safetensors(folder / _FILE, stored, metadata)


def _stored(weight: PackedWeight) -> Weight:
    """Return a weight as safetensors keeps it."""
    if weight.format is None:
        values = cast(Tensor, weight.read())
        if values.dtype not in FLOAT_DTYPES.values():
            raise OptionError(f"{weight.key} is {values.dtype}; expected one of {', '.join(FLOAT_DTYPES)}, or a format")
        return Weight.of(weight.key, values)
    if weight.format not in FORMATS:
        raise OptionError(f"{weight.key}: format is {show_value(weight.format)}; expected {', '.join(FORMATS)}")
    rows, columns = cast(tuple[int, int], weight.shape)
    format = FORMATS[weight.format]
    shape = _tiles(rows, columns // format.columns, format)
    return Weight(weight.key, shape, torch.uint8, lambda: _read_tiles(weight))


def _read_tiles(weight: PackedWeight) -> Tensor:
    linear = cast(LinearPacked, weight.read())
    found = linear.format.name, (linear.out_features, linear.in_features)
    if found != (weight.format, weight.shape):
        raise CheckpointError(f"{weight.key}: packed as {found}; expected {(weight.format, weight.shape)}")
    if not linear.has_finite_scales():
        raise CheckpointError(f"{weight.key}: has scales that are NaN or infinite; so are weights of the original")
    return linear.weight


def _tiles(rows: int, tiles: int, format: PackedFormat) -> tuple[int, int, int]:
    return -(-rows // TILE_ROWS), tiles, format.tile_bytes


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))


# --- reading ----------------------------------------------------------------------------------------------------------


def is_packed_folder(path: Path) -> bool:
    """Whether a folder's config says that it is a packed one.

    Raises:
        ConfigError: If the config cannot be read.
    """
    raw = read_json_object(path / "config.json", HEADER_LIMIT_BYTES).get("quantization_config")
    return isinstance(raw, dict) and cast(Mapping[str, Any], raw).get("quant_method") == METHOD


class PackedCheckpoint:
    """A Llama in a packed folder.

    Args:
        path: The folder.

    Attributes:
        recipe: How the weights were made.

    Raises:
        ConfigError: For a config that is malformed or not supported.
        CheckpointError: If the file is malformed or missing, or weights, metadata and config disagree.
        UnsupportedFormatError: For another version or layout, or a format that is not known.
    """

    format: FormatName = "packed"

    def __init__(self, path: Path) -> None:
        self.path = path
        raw = read_json_object(path / "config.json", HEADER_LIMIT_BYTES)
        self.config = ModelConfig.from_hf(raw, str(path / "config.json"))
        generation = path / "generation_config.json"
        self.generation_config: Mapping[str, Any] = (
            read_json_object(generation, HEADER_LIMIT_BYTES) if generation.exists() else {}
        )
        file = path / _FILE
        _check_machine(file)
        self._tensors, metadata = read_safetensors_header(file)
        _check_layout(file, metadata)
        self.recipe = _json_object(file, metadata, "recipe")
        matrices = _json_object(file, metadata, "matrices")
        tiled = [name for name, tensor in self._tensors.items() if tensor.dtype not in FLOAT_DTYPES]
        check_names(file, matrices, tiled, f"those of {_KEYS['matrices']}; {_HOW}")
        self._file = TensorFile(file)
        self.entries: Mapping[str, TensorEntry] = {
            name: _entry(file, tensor, matrices.get(name)) for name, tensor in self._tensors.items()
        }
        check_weights(path, self.config, {key: entry.shape for key, entry in self.entries.items()})

    def read(self, key: str, out: Tensor | None = None) -> Tensor:
        """Return a weight's values; see `Checkpoint.read`."""
        entry = self.entries[key]
        check_out(out, key, entry.shape)
        if entry.dtype in FORMATS:
            linear = LinearPacked(self.packed(key).data, entry.shape[0], FORMATS[entry.dtype])
            if out is None:
                return linear.dequantize()
            for start, stop in linear.chunks():
                out[start:stop] = linear.dequantize_rows(start, stop, torch.float32)
            return out
        offset, dtype = self._tensors[key].offset, FLOAT_DTYPES[entry.dtype]
        if out is not None:
            return self._file.tensor_into(out, offset, dtype)
        return self._file.tensor(offset, entry.shape, dtype)

    def packed(self, key: str) -> PackedTensor:
        """Return a weight's tiles, a view of the file; see `Checkpoint.packed`."""
        entry, tensor = self.entries[key], self._tensors[key]
        if entry.dtype not in FORMATS:
            raise CheckpointError(f"{escape(self.path)}: {key} is {entry.dtype}, which is not packed; read it")
        return PackedTensor(entry.dtype, entry.shape, self._file.tensor(tensor.offset, tensor.shape, torch.uint8), {})


def _check_machine(path: Path) -> None:
    if sys.byteorder != "little":
        raise UnsupportedFormatError(
            f"{escape(path)}: packed weights are little-endian, and this machine is big-endian; take the model unpacked"
        )


def _check_layout(file: Path, metadata: Mapping[str, str]) -> None:
    for name, expected in (("version", _VERSION), ("layout", _LAYOUT)):
        found = metadata.get(_KEYS[name])
        if found is None:
            raise _fault(file, f"{_KEYS[name]} is missing")
        if found != expected:
            raise UnsupportedFormatError(
                f"{escape(file)}: {_KEYS[name]} is {show_value(found)}; this version of Llamarium reads {expected!r}. "
                f"Take the version that wrote it, or {_HOW}"
            )


def _json_object(file: Path, metadata: Mapping[str, str], name: str) -> dict[str, Any]:
    try:
        value = json.loads(metadata.get(_KEYS[name], ""))
    except (ValueError, RecursionError) as error:
        raise _fault(file, f"{_KEYS[name]} is no JSON: {escape(error)}") from None
    if not isinstance(value, dict):
        raise _fault(file, f"{_KEYS[name]} is {type(value).__name__}; expected an object")
    return cast(dict[str, Any], value)


def _entry(file: Path, tensor: SafetensorsTensor, matrix: Any) -> TensorEntry:
    """Describe a tensor, with its logical shape; a tiled one is checked whole."""
    name, shape, dtype = tensor.name, tensor.shape, tensor.dtype
    if dtype not in FLOAT_DTYPES:
        format, rows = _matrix(file, name, matrix)
        tiles = shape[1] if len(shape) == 3 else 0
        expected = _tiles(rows, tiles, format)
        if dtype != "U8" or not tiles or shape != expected:
            wanted = (*expected[:1], tiles or "tiles", *expected[2:])
            raise _fault(
                file,
                f"tensor {escape(name, 80)} is {dtype} {shape}; {rows} rows in {format.name} are "
                f"U8 ({', '.join(map(str, wanted))})",
            )
        if tensor.offset % _ALIGNMENT:
            raise _fault(
                file,
                f"tensor {escape(name, 80)} begins at byte {tensor.offset}; expected a multiple of {_ALIGNMENT}",
            )
        shape, dtype = (rows, tiles * format.columns), format.name
    return TensorEntry(name, shape, dtype, tensor.num_bytes, file, name)


def _matrix(file: Path, name: str, matrix: Any) -> tuple[PackedFormat, int]:
    """Return what the metadata says of a matrix."""
    fields: Mapping[str, Any] = cast(Mapping[str, Any], matrix) if isinstance(matrix, dict) else {}
    format, rows = fields.get("format"), fields.get("rows")
    if not isinstance(rows, int) or isinstance(rows, bool) or rows < 1:
        raise _fault(file, f"tensor {escape(name, 80)} has {show_value(rows)} rows; expected at least 1")
    if not isinstance(format, str) or format not in FORMATS:
        raise UnsupportedFormatError(
            f"{escape(file)}: tensor {escape(name, 80)} is packed as {show_value(format)}; known are "
            f"{', '.join(FORMATS)}. Take a newer version of Llamarium, or {_HOW}"
        )
    return FORMATS[format], rows


def _fault(file: Path, message: str) -> CheckpointError:
    return CheckpointError(f"{escape(file)}: {message}; the file is damaged, or written by something else: {_HOW}")
