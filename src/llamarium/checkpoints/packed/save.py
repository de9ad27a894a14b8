"""Writing a packed folder (`packed/folder.py` says what it is, and reads it)."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from llamarium.checkpoints.checkpoint import check_weights
from llamarium.checkpoints.huggingface.writer import OutputTensor, complete_folder, write_safetensors
from llamarium.checkpoints.packed.folder import KEYS, LAYOUT, METHOD, VERSION, check_machine, tiles_shape
from llamarium.checkpoints.storage import FLOATS
from llamarium.config import ModelConfig
from llamarium.errors import CheckpointError, OptionError, show_value
from llamarium.file_names import SAFETENSORS
from llamarium.quant.formats import PACKED_FORMATS, PackedFormat
from llamarium.quant.packing import count_nonfinite_tiles
from llamarium.tokenizer.base import Tokenizer

_NAMES = {np.dtype(dtype): name for name, dtype in FLOATS.items()}


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight that is about to be written.

    Attributes:
        shape: Its logical shape, (out, in), or a norm's (hidden,).
        format: Its type's name in `PACKED_FORMATS`; None for a tensor that stays in floating point.
        read: Makes tiles, uint8, or, without a format, values, bfloat16 as uint16. Called once: for tiles when they are
            written, so that nothing holds two models; for values at the beginning, as the file's head has their type.
    """

    key: str
    shape: tuple[int, int] | tuple[int]
    format: str | None
    read: Callable[[], NDArray[Any]]


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

    `weights` are in the order of writing; `recipe` says how they were made, as a record: {"matrices": "Q4_0",
    "scales": "fitted", ...}. Other arguments and errors are those of `save_weights`.

    Raises:
        CheckpointError: If weights and config disagree, or a scale is NaN or infinite.
        OptionError: For a format or a dtype that is not written.
        UnsupportedFormatError: On a machine that keeps numbers with the big end first.
    """
    check_machine(folder)
    check_weights(folder, config, {weight.key: weight.shape for weight in weights})
    metadata = {
        "format": "pt",
        KEYS["version"]: VERSION,
        KEYS["layout"]: LAYOUT,
        KEYS["matrices"]: _json({w.key: {"format": w.format, "rows": w.shape[0]} for w in weights if w.format}),
        KEYS["recipe"]: _json(recipe),
    }
    fields = {**config.to_hf(), "dtype": "bfloat16", "torch_dtype": "bfloat16"}
    fields["quantization_config"] = {"quant_method": METHOD}
    stored = list(map(_stored, weights))
    with complete_folder(folder, config, fields, tokenizer, generation_config or {}):
        write_safetensors(folder / SAFETENSORS, stored, metadata)


def _stored(weight: PackedWeight) -> OutputTensor:
    if weight.format is None:
        values = weight.read()
        if values.dtype not in _NAMES:
            known = ", ".join(_NAMES.values())
            raise OptionError(f"{weight.key} is {values.dtype}; expected one of {known}, or a format")
        return OutputTensor(weight.key, values.shape, _NAMES[values.dtype], lambda: values)
    if weight.format not in PACKED_FORMATS:
        raise OptionError(f"{weight.key}: format is {show_value(weight.format)}; expected {', '.join(PACKED_FORMATS)}")
    rows, columns = cast(tuple[int, int], weight.shape)
    format = PACKED_FORMATS[weight.format]
    shape = tiles_shape(rows, columns // format.columns, format)
    return OutputTensor(weight.key, shape, "U8", lambda: _read_tiles(weight, shape, format))


def _read_tiles(weight: PackedWeight, shape: tuple[int, ...], format: PackedFormat) -> NDArray[Any]:
    tiles = weight.read()
    if tiles.shape != shape:
        raise CheckpointError(f"{weight.key}: packed as {tiles.shape}; expected {shape}, {weight.shape} {format.name}")
    if count_nonfinite_tiles(tiles, format):
        raise CheckpointError(f"{weight.key}: has scales that are NaN or infinite; so are weights of the original")
    return tiles


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))
