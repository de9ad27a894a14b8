"""Read adapters in PEFT's layout without torch: what `peft`, vLLM, llama.cpp's converter and others use.

    adapter_config.json         which Linears, rank, alpha, the base model's name
    adapter_model.safetensors   base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight, ...
    tokenizer.json, ...         the base's tokenizer with the dialog format of the training

The header of the safetensors file identifies the base (`base_check.py`). PEFT has many kinds of adapters. A field that
is not implemented here is refused by name and value, unless it is off (null, false, empty). `save.py` writes adapters.

Source: peft, `utils/save_and_load.py`, `config.py`, `tuners/lora/config.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from llamarium.adapters.config import LoRAConfig
from llamarium.checkpoints.checkpoint import check_names, expected_shapes
from llamarium.checkpoints.huggingface.safetensors_file import SafetensorsTensor, read_safetensors_header
from llamarium.checkpoints.storage import FLOATS, TensorFile
from llamarium.config import EMBEDDING, HEAD, ModelConfig, read_json_object
from llamarium.errors import (
    CheckpointError,
    ModelNotFoundError,
    OptionError,
    TrainingError,
    UnsupportedFormatError,
    escape,
    show_value,
)
from llamarium.hub.builtin import BUILTINS
from llamarium.hub.folders import what_to_name
from llamarium.quant.packing import to_float32

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

_PICKLE = "adapter_model.bin"
PREFIX = "base_model.model."
BUILTIN = "llamarium_builtin"

# Fields that are read, and fields that say nothing about what an adapter computes.
_READ = frozenset("r lora_alpha lora_dropout target_modules use_rslora use_dora base_model_name_or_path".split())
_NEUTRAL = frozenset("peft_version inference_mode revision auto_mapping megatron_core qalora_group_size".split())
# The values that other fields may have, apart from being off. Ways to begin that change the base are not among them.
_ALLOWED: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM",),
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),
}


@dataclass(frozen=True, slots=True)
class SavedAdapter:
    """An adapter from disk that fits its base's Linears.

    Attributes:
        metadata: The header of its tensors' file.
        linears: Full names of the adapted Linears.
        tensors: Finite float32, by the model's keys, such as `lm_head.lora_A.weight`.
    """

    folder: Path
    config: LoRAConfig
    base_name: str | None
    metadata: Mapping[str, str]
    linears: tuple[str, ...]
    tensors: Mapping[str, NDArray[np.float32]]


def linear_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return the shape (out, in) of each Linear by its full name, the head last."""
    shapes = {
        key.removesuffix(".weight"): (shape[0], shape[1])
        for key, shape in expected_shapes(config).items()
        if len(shape) == 2 and key != EMBEDDING
    }
    return shapes | {HEAD.removesuffix(".weight"): (config.vocab_size, config.hidden_size)}


def read_adapter(folder: Path, config: ModelConfig) -> SavedAdapter:
    """Read an adapter for a base with this config.

    Raises:
        ModelNotFoundError: If there is no such folder or file.
        ConfigError: If the config is no JSON object.
        UnsupportedFormatError: For another kind of adapter, or a field that is not implemented.
        CheckpointError: If the adapter is malformed, or does not fit this base.
    """
    raw = read_adapter_config(folder)
    adapter, path, linears = _from_peft(raw, folder), folder / WEIGHTS, linear_shapes(config)
    try:
        names = adapter.choose(list(linears), is_tied=config.tie_word_embeddings)
    except TrainingError as error:
        raise CheckpointError(f"{escape(folder / CONFIG)}: {error}; it belongs to another base") from None
    table, metadata = read_safetensors_header(path)
    _check_shapes(path, _expected_shapes(linears, names, adapter), table)
    base = raw.get("base_model_name_or_path")
    return SavedAdapter(folder, adapter, base, metadata, tuple(names), _read_tensors(path, table))


def base_name(folder: Path) -> str | None:
    """Return the name of an adapter's base as `load` takes it, or None where none is given; errors as `read_adapter`.

    For a built-in model `adapter_config.json` has the repository that it was made from, and the header of the tensors'
    file has the built-in name.
    """
    name = read_adapter_config(folder).get("base_model_name_or_path")
    if any(item.origin == name for item in BUILTINS.values()):
        builtin = read_metadata(folder).get(BUILTIN, "")
        if builtin in BUILTINS and BUILTINS[builtin].origin == name:
            return builtin
    return name


def base_of(folder: Path) -> str:
    """Return `base_name`, or OptionError if there is none."""
    name = base_name(folder)
    if name is None:
        raise OptionError(f"{escape(folder / CONFIG)}: names no base model; name it with -m (in Python: model=)")
    return name


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Read `adapter_config.json` and check that everything in it is implemented; errors as `read_adapter`."""
    if (advice := what_to_name(folder, adapter=True)) is not None:
        raise ModelNotFoundError(advice)
    if not folder.is_dir():
        raise ModelNotFoundError(f"{escape(folder)}: no such folder; expected one with {CONFIG} and {WEIGHTS}")
    if (folder / _PICKLE).exists() and not (folder / WEIGHTS).exists():
        raise UnsupportedFormatError(
            f"{escape(folder / _PICKLE)}: is a pickle, which could run anything; convert it to {WEIGHTS} where you "
            "trust it"
        )
    path = folder / CONFIG
    if not path.exists():
        what = "is a model, no adapter; expected a folder with" if (folder / "config.json").exists() else "has no"
        raise ModelNotFoundError(f"{escape(folder)}: {what} {CONFIG}")
    raw = read_json_object(path)
    for name, value in raw.items():
        is_off = value is None or value is False or value in ("", [], {})
        allowed = ((type(one), one) for one in _ALLOWED.get(name, ()))
        fits = name in _READ or name in _NEUTRAL or is_off or (type(value), value) in allowed
        if not fits or (name == "peft_type" and is_off):
            raise _unsupported(path, name, value)
    if "peft_type" not in raw:
        raise _unsupported(path, "peft_type", None)
    base = raw.get("base_model_name_or_path")
    if base is not None and not isinstance(base, str):
        raise CheckpointError(f"{escape(path)}: base_model_name_or_path is {show_value(base)}; expected a name")
    return raw


def _from_peft(raw: Mapping[str, Any], folder: Path) -> LoRAConfig:
    path, targets = folder / CONFIG, raw.get("target_modules")
    if isinstance(targets, str) and targets != "all-linear":  # a regular expression
        raise UnsupportedFormatError(
            f'{escape(path)}: target_modules is {show_value(targets)}; expected a list of names, or "all-linear"'
        )
    alpha = raw.get("lora_alpha")
    if not isinstance(alpha, int | float):
        raise CheckpointError(f"{escape(path)}: lora_alpha is {show_value(alpha)}; expected a number above 0")
    try:
        return LoRAConfig(
            r=cast(int, raw.get("r")),
            alpha=alpha,
            dropout=raw.get("lora_dropout", 0.0),
            target_modules=tuple(cast("list[str]", targets)) if isinstance(targets, list) else cast(str, targets),
            use_rslora=raw.get("use_rslora", False),
            use_dora=raw.get("use_dora", False),
        )
    except TrainingError as error:
        raise CheckpointError(f"{escape(path)}: {error}") from None


def _unsupported(path: Path, name: str, value: object) -> UnsupportedFormatError:
    allowed = ", ".join(map(show_value, _ALLOWED.get(name, ()))) or "nothing"
    return UnsupportedFormatError(
        f"{escape(path)}: {escape(name, 80)} is {show_value(value)}, which is not supported; expected {allowed}"
    )


def read_metadata(folder: Path) -> Mapping[str, str]:
    """Return the header of an adapter's file (see `adapter_metadata`); LlamariumError if it cannot be read."""
    return read_safetensors_header(folder / WEIGHTS)[1]


def _expected_shapes(
    linears: Mapping[str, tuple[int, int]], names: list[str], config: LoRAConfig
) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for name in names:
        num_rows, num_columns = linears[name]
        shapes[f"{PREFIX}{name}.lora_A.weight"] = (config.r, num_columns)
        shapes[f"{PREFIX}{name}.lora_B.weight"] = (num_rows, config.r)
        if config.use_dora:
            shapes[f"{PREFIX}{name}.lora_magnitude_vector"] = (num_rows,)
    return shapes


def _check_shapes(path: Path, expected: Mapping[str, tuple[int, ...]], table: Mapping[str, SafetensorsTensor]) -> None:
    check_names(path, expected, table, f"those that {CONFIG} and this base ask for")
    for key, shape in expected.items():
        if table[key].shape != shape:
            raise CheckpointError(
                f"{escape(path)}: {key} has shape {table[key].shape}; {CONFIG} and this base need {shape}"
            )
        if table[key].dtype not in FLOATS:
            known = ", ".join(FLOATS)
            raise UnsupportedFormatError(f"{escape(path)}: {key} has dtype {table[key].dtype}; expected {known}")


def _read_tensors(path: Path, table: Mapping[str, SafetensorsTensor]) -> dict[str, NDArray[np.float32]]:
    """Read all tensors, float32, under the model's own keys; CheckpointError if one is not finite."""
    file, tensors = TensorFile(path), dict[str, NDArray[np.float32]]()
    for key, entry in table.items():
        values = to_float32(file.array(entry.offset, entry.shape, FLOATS[entry.dtype], copy=True))
        if not np.isfinite(values).all():
            raise CheckpointError(f"{escape(path)}: {key} has NaN or infinite values; the adapter is damaged")
        tensors[key.removeprefix(PREFIX)] = values
    return tensors
