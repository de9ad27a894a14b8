"""Writing packed folders; `packed/folder.py` describes and reads them."""

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
    """A weight to write.

    Attributes:
        key: State-dict key.
        shape: Logical shape, (out, in), or (hidden,) for a norm.
        format: Name of its type in `PACKED_FORMATS`; None for a floating-point tensor.
        read: Returns tiles, uint8, or without a format the values, bfloat16 as uint16. Called once: for tiles when they
            are written, to bound memory; for values before that, because the header needs their dtype.
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

    `weights` are written in order; `recipe` records how they were made: {"matrices": "Q4_0", "scales": "fitted", ...}.
    For other arguments and errors see `save_weights`.

    Raises:
        CheckpointError: If weights do not match the config, or a scale is NaN or infinite.
        OptionError: For an unsupported type or dtype.
        UnsupportedFormatError: On a big-endian machine.
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
            dtypes = ", ".join(_NAMES.values())
            raise OptionError(f"{weight.key} is {values.dtype}; expected one of {dtypes}, or a format")
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
