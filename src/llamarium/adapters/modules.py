"""A saved adapter on PyTorch modules: put on, and held against its base."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from llamarium.adapters import base_check
from llamarium.adapters.base_check import Share, sampled_embedding, sampled_linear, sha256
from llamarium.adapters.config import ALL_PROJECTIONS, LoRAConfig
from llamarium.adapters.files import SavedAdapter, read_adapter
from llamarium.adapters.lora import LoRALinear, apply_lora, lora_linears, rows_of
from llamarium.errors import CheckpointError
from llamarium.model import LlamaForCausalLM
from llamarium.model.norm import LlamaRMSNorm
from llamarium.quant.base import QuantizedLinear


def load_adapter(
    model: LlamaForCausalLM, folder: Path, *, trainable: bool = False, check_base: bool = True
) -> LoRAConfig:
    """Read an adapter and put it on its base, plain or quantized, in place; after an error the model is unchanged.

    Adapters stay frozen unless `trainable`; `check_base` refuses another base, and one that contains the adapter.
    LlamariumError as `read_adapter` and `check_base`, or if the model has adapters already.
    """
    saved = read_adapter(folder, model.config)
    put_on(model, saved, check_base=check_base)
    if trainable:
        for key, parameter in model.named_parameters():
            parameter.requires_grad_(".lora_" in key)
    return saved.config


def put_on(model: LlamaForCausalLM, saved: SavedAdapter, *, check_base: bool = True) -> None:
    """Put an adapter on its base, in place, and freeze both; errors as for `load_adapter`."""
    trained = {key for key, parameter in model.named_parameters() if parameter.requires_grad}
    apply_lora(model, saved.config, seed=None)
    tensors = {key: torch.from_numpy(values) for key, values in saved.tensors.items()}
    model.load_state_dict(tensors, strict=False)  # names are checked already; the base's are not in it
    if check_base:
        try:
            base_check.check_base(ModuleBase(model), saved)
        except CheckpointError:
            for name in saved.linears:
                model.set_submodule(name, cast(Any, model.get_submodule(name)).base_layer)
            for key, parameter in model.named_parameters():
                parameter.requires_grad_(key in trained)
            raise
    model.requires_grad_(False)


@dataclass(frozen=True, slots=True)
class Projection:
    """How much of the adapters' correction C the weights W contain.

    Attributes:
        share: Of the base's weights.
        merged: `of_correction` of the merged weights: 1 more, except for DoRA, which scales their rows.
    """

    share: Share
    merged: float


@dataclass(frozen=True, slots=True)
class ModuleBase:
    """A model as a `Base`, on any device; adapters on it are ignored by the fingerprints."""

    model: LlamaForCausalLM

    def fingerprint(self) -> str | None:
        """See `Base.fingerprint`."""
        model = self.model
        if model.dtype is torch.float16:
            return None
        picked = torch.tensor(sampled_embedding(model.config.vocab_size), device=model.device)
        with torch.no_grad():
            rows = model.model.embed_tokens(picked)
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
        found = self.projection()
        return None if found is None else found.share

    @torch.no_grad()
    def projection(self) -> Projection | None:
        """Measure the adapters on the model; None where W is sharded over processes."""
        inner = inner_merged = correction = base = 0.0
        count = 0
        for _, linear in lora_linears(self.model):
            if hasattr(linear.base_layer.weight, "to_local"):  # a DTensor
                return None
            for start, stop, merged in linear.merged_rows():
                weights, change = rows_of(linear.base_layer, start, stop), linear.correction(start, stop)
                inner += float((weights * change).sum(dtype=torch.float64))  # sync: a few times a matrix
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
            yield values + 0.0 if isinstance(linear, QuantizedLinear) else values  # -0.0 is 0.0: a code has no sign


def _values(tensor: Tensor) -> NDArray[np.float32]:
    return tensor.detach().float().cpu().numpy()  # sync: some rows, once in a model's life
