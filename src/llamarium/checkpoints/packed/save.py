"""Writing a packed folder (`packed/folder.py` says what it is, and reads it)."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from llamarium.checkpoints.checkpoint import check_weights
from llamarium.checkpoints.decode import FLOAT_DTYPES
from llamarium.checkpoints.huggingface.writer import Weight, complete_folder, write_safetensors
from llamarium.checkpoints.packed.folder import FILE, KEYS, LAYOUT, METHOD, VERSION, check_machine, tiles_shape
from llamarium.checkpoints.save import array_of, tensor_weight
from llamarium.config import ModelConfig
from llamarium.errors import CheckpointError, OptionError, show_value
from llamarium.quant.formats import PACKED_FORMATS
from llamarium.quant.packed import LinearPacked
from llamarium.tokenizer.base import Tokenizer


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight that is about to be written.

    Attributes:
        key: Its state-dict key.
        shape: Its logical shape, (out, in), or a norm's (hidden,).
        format: Its type's name in `PACKED_FORMATS`; None for a tensor that stays in floating point.
        read: Makes tiles or, without a format, values. Called once: for tiles when it is their turn to be written, so
            that nothing holds two models; for values at the beginning, as the file's head says what type they are.
    """

    key: str
    shape: tuple[int, int] | tuple[int]
    format: str | None
    read: Callable[[], LinearPacked | Tensor]


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
        recipe: How the weights were made, for whoever wonders later: {"matrices": "Q4_0", "scales": "fitted", ...}.

    Raises:
        CheckpointError: If weights and config disagree, a scale is NaN or infinite, or the tokenizer is too large.
        OptionError: For a format or a dtype that is not written.
        OutputError: If the folder holds a model already, or cannot be written.
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
        write_safetensors(folder / FILE, stored, metadata)


def _stored(weight: PackedWeight) -> Weight:
    """Return a weight as safetensors keeps it."""
    if weight.format is None:
        values = cast(Tensor, weight.read())
        if values.dtype not in FLOAT_DTYPES.values():
            raise OptionError(f"{weight.key} is {values.dtype}; expected one of {', '.join(FLOAT_DTYPES)}, or a format")
        return tensor_weight(weight.key, values)
    if weight.format not in PACKED_FORMATS:
        raise OptionError(f"{weight.key}: format is {show_value(weight.format)}; expected {', '.join(PACKED_FORMATS)}")
    rows, columns = cast(tuple[int, int], weight.shape)
    format = PACKED_FORMATS[weight.format]
    shape = tiles_shape(rows, columns // format.columns, format)
    return Weight(weight.key, shape, "U8", lambda: array_of(_read_tiles(weight)))


def _read_tiles(weight: PackedWeight) -> Tensor:
    linear = cast(LinearPacked, weight.read())
    found = linear.format.name, (linear.out_features, linear.in_features)
    if found != (weight.format, weight.shape):
        raise CheckpointError(f"{weight.key}: packed as {found}; expected {(weight.format, weight.shape)}")
    if not linear.has_finite_scales():
        raise CheckpointError(f"{weight.key}: has scales that are NaN or infinite; so are weights of the original")
    return linear.weight


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))
