"""What `base_check.py` asks of a base, answered of modules, on any device."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from llamarium.adapters.base_check import Share, sampled_embedding, sampled_linear, sha256
from llamarium.adapters.config import ALL_PROJECTIONS
from llamarium.adapters.lora import LoRALinear, lora_linears, rows_of
from llamarium.model import LlamaForCausalLM
from llamarium.model.norm import LlamaRMSNorm
from llamarium.quant.base import QuantizedLinear


@dataclass(frozen=True, slots=True)
class ModuleBase:
    """A model with the adapter on it, as a `Base`."""

    model: LlamaForCausalLM

    def fingerprint(self) -> str | None:
        """See `Base.fingerprint`."""
        return base_fingerprint(self.model)

    def linears_fingerprint(self) -> str:
        """See `Base.linears_fingerprint`; adapters on them do not count."""
        return linears_fingerprint(self.model)

    def share(self) -> Share | None:
        """See `Base.share`."""
        found = projection(self.model)
        return None if found is None else found.share


def base_fingerprint(model: LlamaForCausalLM) -> str | None:
    """Return a model's `Base.fingerprint`."""
    if model.dtype is torch.float16:
        return None
    picked = torch.tensor(sampled_embedding(model.config.vocab_size), device=model.device)
    with torch.no_grad():
        rows = model.model.embed_tokens(picked)
    norms = (module.weight for module in model.modules() if isinstance(module, LlamaRMSNorm))
    return sha256(map(_values, (rows, *norms)))


def linears_fingerprint(model: LlamaForCausalLM) -> str:
    """Return a model's `Base.linears_fingerprint`, without its adapters."""
    linears = list(_base_linears(model))
    stored = "+".join(sorted({_storage(linear, model.dtype) for linear in linears}))
    return f"{stored}:{sha256(map(_values, _sampled(linears)))}"


def _base_linears(model: LlamaForCausalLM) -> Iterator[nn.Module]:
    for name, module in model.model.layers.named_modules():
        if name.endswith(ALL_PROJECTIONS):
            yield module.base_layer if isinstance(module, LoRALinear) else module


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


@dataclass(frozen=True, slots=True)
class Projection:
    """How much of the adapters' correction C lies in the weights W.

    Attributes:
        share: Of the base's weights.
        merged: What its `of_correction` would be of the merged weights: 1 more, but for DoRA, which scales their rows.
    """

    share: Share
    merged: float


@torch.no_grad()
def projection(model: nn.Module) -> Projection | None:
    """Measure a model with adapters; None where W is sharded over processes."""
    inner = inner_merged = correction = base = 0.0
    count = 0
    for _, linear in lora_linears(model):
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
