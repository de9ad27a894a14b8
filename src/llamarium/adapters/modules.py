"""Putting a saved adapter on modules."""

from pathlib import Path
from typing import Any, cast

import torch

from llamarium.adapters import base_check
from llamarium.adapters.config import LoRAConfig
from llamarium.adapters.files import SavedAdapter, read_adapter
from llamarium.adapters.lora import apply_lora, lora_linears
from llamarium.adapters.module_base import ModuleBase
from llamarium.errors import CheckpointError, TrainingError
from llamarium.model import LlamaForCausalLM


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
        LlamariumError: As `read_adapter`. The model is as it was then.
        CheckpointError: As `check_base`; likewise.
        TrainingError: If the model has adapters already.
    """
    if any(lora_linears(model)):
        raise TrainingError("the model has LoRA adapters already; merge them, or load the model afresh")
    saved = read_adapter(folder, model.config)
    put_on(model, saved, check_base=check_base)
    if trainable:
        for key, parameter in model.named_parameters():
            parameter.requires_grad_(".lora_" in key)
    return saved.config


def put_on(model: LlamaForCausalLM, saved: SavedAdapter, *, check_base: bool = True) -> None:
    """Put an adapter on the model that it was read for, in place, frozen as the base is then.

    Raises:
        CheckpointError: If `check_base` is asked for and this is not its base. The model is as it was then.
    """
    trained = {key for key, parameter in model.named_parameters() if parameter.requires_grad}
    apply_lora(model, saved.config, seed=None)
    tensors = {key: torch.from_numpy(values) for key, values in saved.tensors.items()}
    model.load_state_dict(tensors, strict=False)  # the names are checked already; the base's are not in it
    if check_base:
        try:
            base_check.check_base(ModuleBase(model), saved)
        except CheckpointError:
            _take_off(model, saved, trained)
            raise
    model.requires_grad_(False)


def _take_off(model: LlamaForCausalLM, saved: SavedAdapter, trained: set[str]) -> None:
    """Make a model what it was before `apply_lora`."""
    for name in saved.linears:
        model.set_submodule(name, cast(Any, model.get_submodule(name)).base_layer)
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(key in trained)
