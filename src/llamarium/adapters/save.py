"""Write adapters in PEFT's layout; `files.py` describes and reads it."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llamarium.adapters.base_check import BASE_KEY, LINEARS_KEY, PROJECTION_KEY, QUANTIZED_KEY, STORED_KEY
from llamarium.adapters.config import EMBED_TOKENS, LM_HEAD, LoRAConfig
from llamarium.adapters.files import BUILTIN, PREFIX
from llamarium.adapters.lora import adapted_modules
from llamarium.adapters.modules import ModuleBase, saves
from llamarium.checkpoints.huggingface.writer import OutputTensor, write_safetensors
from llamarium.checkpoints.save import tensor_weight
from llamarium.config import EMBEDDING, HEAD
from llamarium.errors import TrainingError
from llamarium.file_names import ADAPTER, ADAPTER_CONFIG
from llamarium.hub.builtin import BUILTINS
from llamarium.io import sync, unwritable, write_json
from llamarium.model import LlamaForCausalLM
from llamarium.tokenizer.base import Tokenizer


def save_adapter(
    model: LlamaForCausalLM,
    folder: Path,
    *,
    base_model: str | None = None,
    metadata: Mapping[str, str] | None = None,
    full_tensor: Callable[[Tensor], Tensor] | None = None,
    tokenizer: Tokenizer | None = None,
) -> None:
    """Write a model's adapters in float32, replacing those in `folder`; each file is written atomically.

    Args:
        model: A model with adapters.
        folder: Output folder, created if missing. The config is written last.
        base_model: Name of the base, as for `load`.
        metadata: `adapter_metadata` of the model, if it was computed before; None computes it.
        full_tensor: Gathers a tensor that is sharded over processes.
        tokenizer: Tokenizer to save with the adapters.

    Raises:
        TrainingError: If the model has no adapters.
        OutputError: If the folder cannot be written.
    """
    adapted = dict(adapted_modules(model))
    if not adapted:
        raise TrainingError("the model has no LoRA adapters to save; apply_lora adds them")
    config = next(iter(adapted.values())).config
    tensors = adapter_tensors(model)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        weights = [_weight(PREFIX + key, tensor, full_tensor) for key, tensor in tensors.items()]
        metadata = adapter_metadata(model, base_model) if metadata is None else metadata
        if (projection := ModuleBase(model).projection()) is not None:
            metadata = {**metadata, PROJECTION_KEY: f"{projection.share.of_correction!r} {projection.merged!r}"}
        write_safetensors(folder / ADAPTER, weights, metadata)
        if tokenizer is not None:
            tokenizer.save(folder)
        names = dict.fromkeys(name.rpartition(".")[2] for name in adapted)  # some readers do not support "all-linear"
        targets = [*names] if config.target_modules == "all-linear" else _listed(config.target_modules)
        write_json(
            folder / ADAPTER_CONFIG, _to_peft(config, targets, _saved_modules(model, config), _published(base_model))
        )
        sync(folder)
    except OSError as error:
        raise unwritable(folder, error) from error


def adapter_tensors(model: LlamaForCausalLM) -> dict[str, Tensor]:
    """Return the tensors of a model's adapters by key: low-rank matrices and whole weights.

    A tied head is included too, because PEFT expects a copy of each saved module.
    """
    tensors: dict[str, Tensor] = {key: p for key, p in model.named_parameters() if ".lora_" in key or saves(model, key)}
    if model.config.tie_word_embeddings and EMBEDDING in tensors:
        tensors[HEAD] = tensors[EMBEDDING]
    return tensors


def _saved_modules(model: LlamaForCausalLM, config: LoRAConfig) -> list[str]:
    tied = model.config.tie_word_embeddings and config.saves(EMBED_TOKENS)
    return [*dict.fromkeys((*config.modules_to_save, *((LM_HEAD,) if tied else ())))]


def _listed(names: tuple[str, ...] | str) -> list[str] | str:
    return names if isinstance(names, str) else [*names]


def adapter_metadata(
    model: LlamaForCausalLM, base_model: str | None = None, stored: str | None = None, quantized: str | None = None
) -> dict[str, str]:
    """Return the header of an adapter's file, which identifies its base.

    Fingerprints are omitted if the adapter replaces weights, because the model then differs from its base.

    Args:
        model: A model with adapters.
        base_model: Name of the base, as for `load`.
        stored: `stored_fingerprint` of the base.
        quantized: Type that the stored base was quantized to, or "none".
    """
    base = ModuleBase(model)
    is_replaced = any(saves(model, key) for key, _ in model.named_parameters())
    fingerprint = None if is_replaced else base.fingerprint()
    fingerprints = {} if fingerprint is None else {BASE_KEY: fingerprint, LINEARS_KEY: base.linears_fingerprint()}
    builtin = {BUILTIN: base_model} if base_model is not None and base_model in BUILTINS else {}
    optional = {STORED_KEY: stored, QUANTIZED_KEY: quantized}
    return (
        {"format": "pt"} | fingerprints | builtin | {key: value for key, value in optional.items() if value is not None}
    )


def _weight(key: str, tensor: Tensor, full_tensor: Callable[[Tensor], Tensor] | None) -> OutputTensor:
    def read() -> Tensor:
        return (tensor if full_tensor is None else full_tensor(tensor)).float()

    return tensor_weight(key, tensor, read, torch.float32)


def _published(name: str | None) -> str | None:
    """Return a base's name for other programs: a Hub repository, or an absolute path."""
    if name is None:
        return None
    if name in BUILTINS:
        return BUILTINS[name].origin or name
    path = Path(os.path.expanduser(name))  # noqa: PTH111 - Path's raises on odd names
    return str(path.absolute()) if path.exists() else name


def _to_peft(
    config: LoRAConfig, targets: list[str] | str, saved_modules: list[str], base_model: str | None
) -> dict[str, Any]:
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
        "modules_to_save": saved_modules or None,
        "exclude_modules": _listed(config.exclude_modules) or None,
        "layers_to_transform": [*config.layers_to_transform] or None,
        "layers_pattern": [*config.layers_pattern] or None,
        "rank_pattern": dict(config.rank_pattern),
        "alpha_pattern": dict(config.alpha_pattern),
        "inference_mode": True,
    }
