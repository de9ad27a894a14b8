"""Applying a saved adapter to PyTorch modules, and checking their base."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from llamarium.adapters import base_check
from llamarium.adapters.base_check import Share, sampled_embedding, sampled_linear, sha256
from llamarium.adapters.config import ALL_PROJECTIONS, EMBED_TOKENS, LM_HEAD, LoRAConfig
from llamarium.adapters.files import EMBEDDING_A, SavedAdapter, read_adapter
from llamarium.adapters.lora import Adapted, LoRALinear, adapted_modules, apply_lora, lora_linears, meta_linear, rows_of
from llamarium.adapters.lora_embedding import table_of
from llamarium.adapters.replacement import Replacement, replacement_of
from llamarium.checkpoints.modules import put_weight
from llamarium.checkpoints.weights import float_weights
from llamarium.config import EMBEDDING, ModelConfig
from llamarium.errors import CheckpointError, UnsupportedFormatError, escape
from llamarium.model import LlamaForCausalLM
from llamarium.model.norm import LlamaRMSNorm
from llamarium.quant.base import QuantizedEmbedding, QuantizedLinear
from llamarium.runtime.native.weights import Weight

_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def load_adapter(
    model: LlamaForCausalLM, folder: Path, *, trainable: bool = False, check_base: bool = True
) -> LoRAConfig:
    """Read an adapter and apply it to its base, plain or quantized, in place; after an error the model is unchanged.

    Args:
        model: The base, without adapters.
        folder: Folder of the adapter.
        trainable: Make the adapters and the weights that they replace trainable; otherwise they are frozen.
        check_base: Refuse another base, and one that contains the adapter already.

    Raises:
        LlamariumError: As `read_adapter` and `check_base`, if the model has adapters already, or if the adapter has
            biases and `trainable` is set.
    """
    saved = read_adapter(folder, model.config)
    if trainable and saved.has_biases:
        raise UnsupportedFormatError(
            f"{escape(folder)}: the adapter has biases, which cannot be trained further; merge it (llamarium merge), "
            "and train a new adapter"
        )
    put_whole(model, saved, check_base=check_base)
    if trainable:
        for key, parameter in model.named_parameters():
            parameter.requires_grad_(".lora_" in key or saves(model, key))
    return saved.config


def put_whole(model: LlamaForCausalLM, saved: SavedAdapter, *, check_base: bool = True) -> None:
    """Apply all of an adapter to its base, in place: corrections, including the embedding's, and whole weights."""
    on_table = EMBEDDING_A in saved.tensors and EMBED_TOKENS not in saved.token_rows
    put = saved.without_embedding() if on_table else saved
    replacement = replacement_of(put, model.config, partial(_whole_weight, model))
    has_new_rows = replacement is not None and replacement.config.vocab_size != model.config.vocab_size
    has_new_rows = has_new_rows and (LM_HEAD in saved.linears or on_table)
    # A head or table with another number of rows must be replaced before its correction is applied. Files of such
    # adapters have no fingerprint of the base, so there is nothing to check.
    if replacement is not None and has_new_rows:
        _put_replacement(model, replacement)
    put_on(model, saved if on_table else put, check_base=check_base and not has_new_rows, on_table=on_table)
    if replacement is not None and not has_new_rows:
        _put_replacement(model, replacement)


def put_on(model: LlamaForCausalLM, saved: SavedAdapter, *, check_base: bool = True, on_table: bool = False) -> None:
    """Apply an adapter's low-rank corrections to Linears, and `on_table` to the embedding, in place; freeze all."""
    trained = {key for key, parameter in model.named_parameters() if parameter.requires_grad}
    apply_lora(model, _for_modules(saved, on_table=on_table), seed=None)
    applied = saved if on_table else saved.without_embedding()
    tensors = {key: torch.from_numpy(values) for key, values in applied.tensors.items()}
    model.load_state_dict(tensors, strict=False)  # names are checked already; the base's keys are missing here
    if check_base:
        try:
            base_check.check_base(ModuleBase(model), saved)
        except CheckpointError:
            for name, module in [*adapted_modules(model)]:
                model.set_submodule(name, module.base_layer)
            for key, parameter in model.named_parameters():
                parameter.requires_grad_(key in trained)
            raise
    model.requires_grad_(False)


def _put_replacement(model: LlamaForCausalLM, replacement: Replacement) -> None:
    put_weights(model, replacement.config, float_weights(replacement.weights, _TYPES[model.dtype]))


def put_weights(model: LlamaForCausalLM, config: ModelConfig, weights: Mapping[str, Weight]) -> None:
    """Replace weights of a model, in place, sharing memory on the CPU; `config` is the config afterwards."""
    dtype, device = model.dtype, str(model.device)
    for key, weight in weights.items():
        name = key.rpartition(".")[0]
        if isinstance(model.get_submodule(name), Adapted):
            name = f"{name}.base_layer"
        if key == EMBEDDING:
            model.set_submodule(name, nn.Embedding(weight.shape[0], weight.shape[1], device="meta"))
        elif len(weight.shape) == 2:
            model.set_submodule(name, meta_linear(weight.shape[1], weight.shape[0]))
        put_weight(model, replace(weight, key=f"{name}.{key.rpartition('.')[2]}"), dtype, device)
    model.config = config
    if EMBEDDING in weights and config.tie_word_embeddings:
        head: Any = getattr(model.lm_head, "base_layer", model.lm_head)
        head.weight = table_of(model.model.embed_tokens).weight
        head.out_features = config.vocab_size


def saves(model: LlamaForCausalLM, key: str) -> bool:
    """Return whether a weight of a model with adapters, by its key, is trained and saved whole."""
    adapted = next((module for _, module in adapted_modules(model)), None)
    return adapted is not None and ".lora_" not in key and adapted.config.saves(key.rpartition(".")[0])


def _for_modules(saved: SavedAdapter, *, on_table: bool) -> LoRAConfig:
    """Return an adapter's settings for modules, with all weights that it replaces in `modules_to_save`."""
    replaced = {key.rpartition(".")[0] for key in saved.weights} | saved.token_rows.keys()
    if EMBEDDING_A in saved.tensors:
        replaced.add(EMBED_TOKENS)
    names = {*saved.config.modules_to_save, *replaced} - {*saved.linears} - ({EMBED_TOKENS} if on_table else set())
    return replace(saved.config, modules_to_save=tuple(sorted(names)))


def _whole_weight(model: LlamaForCausalLM, key: str) -> NDArray[np.float32]:
    module = model.get_submodule(key.rpartition(".")[0])
    module = getattr(module, "base_layer", module)
    weight = module.dequantize() if isinstance(module, QuantizedLinear | QuantizedEmbedding) else module.weight
    return _values(cast(Tensor, weight))


@dataclass(frozen=True, slots=True)
class Projection:
    """The share of the adapters' correction C that the weights W contain, before and after a merge.

    Attributes:
        share: Share in the base's weights.
        merged: `of_correction` of the merged weights: 1 more, except for DoRA, which scales their rows.
    """

    share: Share
    merged: float


@dataclass(frozen=True, slots=True)
class ModuleBase:
    """A model of PyTorch modules as a `Base`, on any device; the fingerprints ignore its adapters."""

    model: LlamaForCausalLM

    def fingerprint(self) -> str | None:
        """See `Base.fingerprint`."""
        model = self.model
        if model.dtype is torch.float16:
            return None
        picked = torch.tensor(sampled_embedding(model.config.vocab_size), device=model.device)
        with torch.no_grad():
            rows = table_of(model.model.embed_tokens)(picked)
        norms = (module.weight for module in model.modules() if isinstance(module, LlamaRMSNorm))
        return sha256(map(_values, (rows, *norms)))

    def linears_fingerprint(self) -> str:
        """See `Base.linears_fingerprint`."""
        modules = (m for name, m in self.model.model.layers.named_modules() if name.endswith(ALL_PROJECTIONS))
        linears = [m.base_layer if isinstance(m, LoRALinear) else m for m in modules]
        stored = "+".join(sorted({_storage(linear, self.model.dtype) for linear in linears}))
        return f"{stored}:{sha256(map(_values, _sampled(linears)))}"

    def share(self) -> Share | None:
        """See `Base.share`."""
        projection = self.projection()
        return None if projection is None else projection.share

    @torch.no_grad()
    def projection(self) -> Projection | None:
        """Measure the projection for the model's adapters; None if W is sharded over processes."""
        inner = inner_merged = correction = base = 0.0
        count = 0
        for _, linear in lora_linears(self.model):
            if hasattr(linear.base_layer.weight, "to_local"):  # a DTensor
                return None
            for start, stop, merged in linear.merged_rows():
                weights, change = rows_of(linear.base_layer, start, stop), linear.correction(start, stop)
                inner += float((weights * change).sum(dtype=torch.float64))  # sync: a few times per matrix
                inner_merged += float((merged * change).sum(dtype=torch.float64))
                correction += float(change.square().sum(dtype=torch.float64))
                base += float(weights.square().sum(dtype=torch.float64))
                count += weights.numel()
        merged = inner_merged / correction if correction else 0.0
        return Projection(Share.of_sums(inner, correction, base, count), merged)


def _storage(linear: nn.Module, dtype: torch.dtype) -> str:
    if not isinstance(linear, QuantizedLinear):
        return "float16" if dtype is torch.float16 else "plain"
    kind: Any = linear
    name = getattr(kind, "type_name", getattr(getattr(kind, "format", None), "name", ""))
    return f"{type(linear).__name__} {name}".strip()


def _sampled(linears: list[nn.Module]) -> Iterator[Tensor]:
    for linear in linears:
        for row in sampled_linear(cast(int, linear.out_features)):
            values = rows_of(linear, row, row + 1)
            # -0.0 to 0.0: the code is the same
            yield values + 0.0 if isinstance(linear, QuantizedLinear) else values


def _values(tensor: Tensor) -> NDArray[np.float32]:
    return tensor.detach().float().cpu().numpy()  # sync: a few rows, once per model
