"""Adapters on disk, in PEFT's layout: what `peft`, vLLM, llama.cpp's converter and others take and give.

    adapter_config.json         which Linears, rank, alpha, the base model's name
    adapter_model.safetensors   base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight, ...
    tokenizer.json, ...         the base's tokenizer with the dialog format that was trained

An adapter says nothing without its base. What tells it stands in the header of the safetensors file, where other
readers pass over it, and is checked (`base_check.py`).

PEFT knows many kinds of adapters. What is not computed here is refused by the name and value of its field; a field that
is off (null, false, empty) does no harm, whether it is known or not.

Source: peft, `utils/save_and_load.py`, `config.py`, `tuners/lora/config.py`.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor

from llamarium.api import Llama
from llamarium.checkpoints.checkpoint import check_names
from llamarium.checkpoints.decode import FLOAT_DTYPES, tensor_in
from llamarium.checkpoints.huggingface.safetensors_file import SafetensorsTensor, read_safetensors
from llamarium.checkpoints.save import Weight, write_safetensors
from llamarium.checkpoints.storage import TensorFile
from llamarium.checkpoints.tokenizers import find_tokenizer, fit_tokenizer
from llamarium.config import ModelConfig, read_json_object
from llamarium.errors import (
    CheckpointError,
    ModelNotFoundError,
    TrainingError,
    UnsupportedFormatError,
    escape,
    show_value,
)
from llamarium.hub.builtin import BUILTINS
from llamarium.hub.folders import what_to_name
from llamarium.io import sync, unwritable, write_json
from llamarium.model import LlamaForCausalLM
from llamarium.tokenizer.base import Tokenizer
from llamarium.train.adapters import base_check
from llamarium.train.adapters.base_check import (
    BASE,
    LINEARS,
    PROJECTION,
    base_fingerprint,
    linears_fingerprint,
    projection,
)
from llamarium.train.adapters.lora import LoRAConfig, apply_lora, lora_linears, low_rank_of, target_names

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

_PICKLE = "adapter_model.bin"
PREFIX = "base_model.model."
_BUILTIN = "llamarium_builtin"

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


def save_adapter(
    model: LlamaForCausalLM,
    folder: Path,
    *,
    base_model: str | None = None,
    metadata: Mapping[str, str] | None = None,
    full_tensor: Callable[[Tensor], Tensor] | None = None,
    tokenizer: Tokenizer | None = None,
) -> None:
    """Write a model's adapters, in float32; each file is complete or untouched, the config last.

    Args:
        model: With adapters.
        folder: Made if missing; an adapter that is there is written over.
        base_model: The base's name, as `load` takes it; for whoever wants to know what the adapter belongs to.
        metadata: What `adapter_metadata` returns of the model; for a base whose weights are not at hand any more.
        full_tensor: Returns all values of a tensor that several processes share.
        tokenizer: Written beside the adapters, for whoever asks the model later.

    Raises:
        TrainingError: If the model has no adapters.
        OutputError: If the folder cannot be written.
    """
    linears = dict(lora_linears(model))
    if not linears:
        raise TrainingError("the model has no LoRA adapters to save; apply_lora adds them")
    config = next(iter(linears.values())).config
    tensors = {key: parameter for key, parameter in model.named_parameters() if ".lora_" in key}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        weights = [_weight(PREFIX + key, tensor, full_tensor) for key, tensor in tensors.items()]
        metadata = adapter_metadata(model, base_model) if metadata is None else metadata
        if (found := projection(model)) is not None:
            metadata = {**metadata, PROJECTION: f"{found.share!r} {found.merged!r}"}
        write_safetensors(folder / WEIGHTS, weights, metadata)
        if tokenizer is not None:
            tokenizer.save(folder)
        names = dict.fromkeys(name.rpartition(".")[2] for name in linears)  # not every reader knows "all-linear"
        targets = [*names] if isinstance(config.target_modules, str) else [*config.target_modules]
        write_json(folder / CONFIG, _to_peft(config, targets, _published(base_model)))
        sync(folder)
    except OSError as error:
        raise unwritable(folder, error) from error


def adapter_metadata(model: LlamaForCausalLM, base_model: str | None = None) -> dict[str, str]:
    """Return what stands in the header of an adapter's file: which base it belongs to."""
    fingerprint = base_fingerprint(model)
    known = {} if fingerprint is None else {BASE: fingerprint, LINEARS: linears_fingerprint(model)}
    named = {_BUILTIN: base_model} if base_model is not None and base_model in BUILTINS else {}
    return {"format": "pt"} | known | named


def base_name(folder: Path) -> str | None:
    """Return the name of an adapter's base, as `load` takes it, or None where none is named.

    A built-in model's name is known here alone, so `adapter_config.json` has the repository that it was made from, and
    the built-in's own name stands in the header of the tensors' file.

    Raises:
        LlamariumError: If the adapter's files cannot be read.
    """
    name = read_adapter_config(folder).get("base_model_name_or_path")
    if any(item.origin == name for item in BUILTINS.values()):
        builtin = read_metadata(folder).get(_BUILTIN, "")
        if builtin in BUILTINS and BUILTINS[builtin].origin == name:
            return builtin
    return name


def with_adapter(llama: Llama, folder: Path) -> Llama:
    """Return a model with an adapter on it, and the tokenizer beside the adapter: its dialogs are those it learned.

    On a CPU with the C kernels the adapter runs there, beside the base's packed products.

    Args:
        llama: The base. Its modules get the adapter.
        folder: The adapter's.

    Raises:
        LlamariumError: As `load_adapter`, or if the tokenizer cannot be read or has more ids than the model.
    """
    load_adapter(llama.model, folder)
    loaded = llama.loaded.with_adapter(low_rank_of(llama.model) if llama.loaded.native is not None else None)
    made = Llama(llama.name, loaded, llama.optional_tokenizer, llama.sources, llama.generation_config)
    return with_tokenizer_of(made, folder)


def with_tokenizer_of(llama: Llama, folder: Path) -> Llama:
    """Return a model with the tokenizer beside its adapter, if there is one: its dialogs are those that were learned.

    Raises:
        LlamariumError: If the tokenizer cannot be read, or has more ids than the model.
    """
    tokenizer = find_tokenizer(folder)
    if tokenizer is None:
        return llama
    fit_tokenizer(tokenizer, llama.config, folder)
    recommended = with_answer_ends(llama.generation_config, llama.config, tokenizer)
    return Llama(llama.name, llama.loaded, tokenizer, llama.sources, recommended)


def with_answer_ends(recommended: Mapping[str, Any], config: ModelConfig, tokenizer: Tokenizer) -> Mapping[str, Any]:
    """Return a generation config by which a model stops where its dialog format ends an answer.

    Args:
        recommended: The base's.
        config: The model's, whose `eos_token_id` counts where `recommended` has none.
        tokenizer: With the format that was learned.
    """
    given = recommended.get("eos_token_id", config.eos_token_id)
    known = [given] if isinstance(given, int) else [*(given or ())]
    ends = () if tokenizer.chat_format is None else tokenizer.chat_format.stop_ids
    more = [i for i in ends if i not in known]
    return {**recommended, "eos_token_id": [*known, *more]} if more else recommended


def _weight(key: str, tensor: Tensor, full_tensor: Callable[[Tensor], Tensor] | None) -> Weight:
    def read() -> Tensor:
        return (tensor if full_tensor is None else full_tensor(tensor)).float()

    return Weight(key, tuple(tensor.shape), torch.float32, read)


def load_adapter(
    model: LlamaForCausalLM, folder: Path, *, trainable: bool = False, check_base: bool = True
) -> LoRAConfig:
    """Read an adapter and put it on its base, in place.

    Args:
        model: The base, without adapters; plain or quantized.
        folder: With `adapter_config.json` and `adapter_model.safetensors`.
        trainable: The adapters are to be trained further; otherwise they are frozen as the base is.
        check_base: Refuse another base than the adapter's own, and one that contains the adapter already, where the
            file tells.

    Raises:
        ModelNotFoundError: If there is no such folder or file.
        ConfigError: If the config is no JSON object.
        UnsupportedFormatError: For another kind of adapter, or a field that is not read, by name and value.
        CheckpointError: If the adapter is malformed, or does not fit this base. The model is as it was then.
        TrainingError: If the model has adapters already.
    """
    raw = read_adapter_config(folder)
    config = _from_peft(raw, folder)
    try:
        names = target_names(model, config)
    except TrainingError as error:
        if any(lora_linears(model)):
            raise
        raise CheckpointError(f"{escape(folder / CONFIG)}: {error}; it belongs to another base") from None
    table = read_safetensors(folder / WEIGHTS)
    _check_shapes(folder / WEIGHTS, _expected_shapes(model, names, config), table)
    tensors = _read_tensors(folder / WEIGHTS, table)
    trained = {key for key, parameter in model.named_parameters() if parameter.requires_grad}
    apply_lora(model, config, seed=None)
    model.load_state_dict(tensors, strict=False)  # the names are checked already; the base's are not in it
    if check_base:
        try:
            base_check.check_base(model, folder, read_metadata(folder), raw.get("base_model_name_or_path"))
        except CheckpointError:
            _take_off(model, names, trained)
            raise
    if not trainable:
        model.requires_grad_(False)
    return config


def _take_off(model: LlamaForCausalLM, names: list[str], trained: set[str]) -> None:
    """Make a model what it was before `apply_lora`."""
    for name in names:
        model.set_submodule(name, cast(Any, model.get_submodule(name)).base_layer)
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(key in trained)


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Read `adapter_config.json` and check that everything it asks for is computed here.

    Raises:
        ModelNotFoundError: If there is no such folder or file.
        ConfigError: If it cannot be read.
        UnsupportedFormatError: For a field that is not supported, by name and value.
        CheckpointError: If the base's name is no text.
    """
    _check_folder(folder)
    path = folder / CONFIG
    raw = read_json_object(path)
    for name, value in raw.items():
        is_off = value is None or value is False or value in ("", [], {})
        fits = name in _READ or name in _NEUTRAL or is_off or _is_among(value, _ALLOWED.get(name, ()))
        if not fits or (name == "peft_type" and is_off):
            raise _unsupported(path, name, value)
    if "peft_type" not in raw:
        raise _unsupported(path, "peft_type", None)
    base = raw.get("base_model_name_or_path")
    if base is not None and not isinstance(base, str):
        raise CheckpointError(f"{escape(path)}: base_model_name_or_path is {show_value(base)}; expected a name")
    return raw


# --- the config -------------------------------------------------------------------------------------------------------


def _published(name: str | None) -> str | None:
    """Return a base's name as other programs find it: a repository of the hub, or a path that is not relative."""
    if name is None:
        return None
    if name in BUILTINS:
        return BUILTINS[name].origin or name
    path = Path(os.path.expanduser(name))  # noqa: PTH111 - Path's raises on odd names
    return str(path.absolute()) if path.exists() else name


def _to_peft(config: LoRAConfig, targets: list[str], base_model: str | None) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": config.r,
        "lora_alpha": int(config.alpha) if float(config.alpha).is_integer() else config.alpha,
        "lora_dropout": config.dropout,
        "target_modules": targets,
        "use_rslora": config.use_rslora,
        "use_dora": config.use_dora,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "inference_mode": True,
    }


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


def _is_among(value: object, allowed: tuple[object, ...]) -> bool:
    return any(value == one and type(value) is type(one) for one in allowed)


def _unsupported(path: Path, name: str, value: object) -> UnsupportedFormatError:
    allowed = ", ".join(map(show_value, _ALLOWED.get(name, ()))) or "nothing"
    return UnsupportedFormatError(
        f"{escape(path)}: {escape(name, 80)} is {show_value(value)}, which is not supported; expected {allowed}"
    )


# --- the tensors ------------------------------------------------------------------------------------------------------


def _check_folder(folder: Path) -> None:
    if (advice := what_to_name(folder, adapter=True)) is not None:
        raise ModelNotFoundError(advice)
    if not folder.is_dir():
        raise ModelNotFoundError(f"{escape(folder)}: no such folder; expected one with {CONFIG} and {WEIGHTS}")
    if (folder / _PICKLE).exists() and not (folder / WEIGHTS).exists():
        raise UnsupportedFormatError(
            f"{escape(folder / _PICKLE)}: is a pickle, which could run anything; convert it to {WEIGHTS} where you "
            "trust it"
        )
    if not (folder / CONFIG).exists():
        raise ModelNotFoundError(f"{escape(folder)}: has no {CONFIG}")


def _expected_shapes(model: LlamaForCausalLM, names: list[str], config: LoRAConfig) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for name in names:
        linear = cast(Any, model.get_submodule(name))
        shapes[f"{PREFIX}{name}.lora_A.weight"] = (config.r, linear.in_features)
        shapes[f"{PREFIX}{name}.lora_B.weight"] = (linear.out_features, config.r)
        if config.use_dora:
            shapes[f"{PREFIX}{name}.lora_magnitude_vector"] = (linear.out_features,)
    return shapes


def _check_shapes(path: Path, expected: Mapping[str, tuple[int, ...]], table: Mapping[str, SafetensorsTensor]) -> None:
    check_names(path, expected, table, f"those that {CONFIG} and this base ask for")
    for key, shape in expected.items():
        if table[key].shape != shape:
            raise CheckpointError(
                f"{escape(path)}: {key} has shape {table[key].shape}; {CONFIG} and this base asks for {shape}"
            )
        if table[key].dtype not in FLOAT_DTYPES:
            known = ", ".join(FLOAT_DTYPES)
            raise UnsupportedFormatError(f"{escape(path)}: {key} has dtype {table[key].dtype}; expected {known}")


def read_metadata(folder: Path) -> dict[str, str]:
    """Return what stands in the header of an adapter's file, as `adapter_metadata` made it.

    Raises:
        LlamariumError: If the file cannot be read.
    """
    read_safetensors(folder / WEIGHTS)  # checks it
    with safe_open(folder / WEIGHTS, "pt") as file:
        return file.metadata() or {}


def _read_tensors(path: Path, table: Mapping[str, SafetensorsTensor]) -> dict[str, Tensor]:
    """Read all tensors, float32, under the model's own keys.

    Raises:
        CheckpointError: If one is not finite.
    """
    file, tensors = TensorFile(path), dict[str, Tensor]()
    for key, entry in table.items():
        values = tensor_in(file, entry.offset, entry.shape, FLOAT_DTYPES[entry.dtype]).float()
        if not values.isfinite().all():
            raise CheckpointError(f"{escape(path)}: {key} has NaN or infinite values; the adapter is damaged")
        tensors[key.removeprefix(PREFIX)] = values
    return tensors
