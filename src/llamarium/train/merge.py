"""Merging: the adapters' correction is added to the weights, and a plain model remains.

A merged weight is rounded once more than the adapter's sum was. In bfloat16, which keeps eight bits, a correction much
smaller than the weight it is added to can vanish, and with it what was learned. So the merged model is asked: its
logits must be the adapter's within what rounding explains, and what part of the correction was lost is measured.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from llamarium.errors import TrainingError, escape
from llamarium.model import LlamaForCausalLM
from llamarium.quant.base import QuantizedLinear
from llamarium.quant.ggml import EmbeddingGGML
from llamarium.train.adapters import load_adapter
from llamarium.train.lora import LoRALinear, meta_linear

# How far logits may be apart, as a share of their own length. A layer's roundings add up over the layers: half a unit
# in the last place is 0.2 % in bfloat16, 0.02 % in float16.
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}
_NUM_PROBES = 64


@dataclass(frozen=True, slots=True)
class MergeReport:
    """What a merge did to the logits of a few random tokens.

    Attributes:
        effect: How far the adapter moves them away from the base's, as a share of their length.
        difference: How far the merged model's are from the adapter's.
        tolerance: How far they may be.
    """

    effect: float
    difference: float
    tolerance: float


@torch.no_grad()
def merge_adapter(model: LlamaForCausalLM, folder: Path, *, check_base: bool = True) -> MergeReport:
    """Put an adapter on its base and merge it, in place, and hold the result against the adapter.

    Warns if half of what the adapter does is lost in rounding.

    Args:
        model: The base, plain or quantized; plain afterwards, in its own dtype.
        folder: The adapter's.
        check_base: See `load_adapter`.

    Raises:
        LlamariumError: As `load_adapter`.
        TrainingError: If the merged model computes something else than the adapter.
    """
    ids_1T = _probes(model)
    base = model(ids_1T).float()
    load_adapter(model, folder, check_base=check_base)
    adapted = model(ids_1T).float()
    merged = merge_adapters(model)(ids_1T).float()
    report = MergeReport(_distance(adapted, base), _distance(merged, adapted), _TOLERANCES[model.dtype])
    dtype = str(model.dtype).removeprefix("torch.")
    if not report.difference <= report.tolerance:
        raise TrainingError(
            f"{escape(folder)}: the merged model's logits are {report.difference:.2%} away from the adapter's; "
            f"expected at most {report.tolerance:.2%} in {dtype}; merge in float32"
        )
    if report.difference > report.effect / 2 > 0:
        warnings.warn(
            f"{escape(folder)}: the adapter moves the logits by {report.effect:.3%}, and merging in {dtype} by "
            f"{report.difference:.3%}: much of what was learned is lost in rounding; merge in float32",
            stacklevel=2,
        )
    return report


def _probes(model: LlamaForCausalLM) -> Tensor:
    """Return random tokens, the same for every model of this vocabulary: (1, T)."""
    count = min(_NUM_PROBES, model.config.max_position_embeddings)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.config.vocab_size, (1, count), generator=generator).to(model.device)


def _distance(logits: Tensor, reference: Tensor) -> float:
    """Return the length of the difference as a share of the reference's, without what softmax does not see."""
    centred = reference - reference.mean(dim=-1, keepdim=True)
    difference = logits - reference
    difference = difference - difference.mean(dim=-1, keepdim=True)
    return (difference.norm() / centred.norm()).item()  # sync: once, at the end


@torch.no_grad()
def merge_adapters(model: LlamaForCausalLM, dtype: torch.dtype | None = None) -> LlamaForCausalLM:
    """Add the adapters to the weights and unpack what is packed, in place: a model of plain Linears remains.

    Args:
        model: With or without adapters.
        dtype: Of the merged and unpacked weights; the model's own where left out. Sums are taken in float32.

    Returns:
        The same model, frozen.
    """
    dtype = dtype or model.dtype
    kinds = (LoRALinear, QuantizedLinear, EmbeddingGGML)
    # Names, not modules: a list of modules would keep every packed weight alive until the end.
    names = [name for name, module in model.named_modules() if isinstance(module, kinds)]
    for name in _without_inner(names):
        if name == "lm_head" and model.config.tie_word_embeddings:
            model.lm_head = meta_linear(model.config.hidden_size, model.config.vocab_size)  # until it is tied, below
        else:
            model.set_submodule(name, _plain(model.get_submodule(name), dtype))
    model.tie_weights()
    return model.to(dtype).requires_grad_(False)


def _without_inner(names: Sequence[str]) -> list[str]:
    """Leave out what lies within another module of the list: a quantized base within its adapter."""
    return [name for name in names if name.removesuffix(".base_layer") == name]


def _plain(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    if isinstance(module, EmbeddingGGML):
        return nn.Embedding.from_pretrained(module.dequantize(dtype))
    assert isinstance(module, LoRALinear | QuantizedLinear)
    weight = module.merged_weight(dtype) if isinstance(module, LoRALinear) else module.dequantize(dtype)
    plain = meta_linear(module.in_features, module.out_features)
    plain.weight = nn.Parameter(weight, requires_grad=False)
    return plain.train(module.training)
