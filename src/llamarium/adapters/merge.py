"""Merging: add the adapters' corrections to the weights, which gives a model without adapters.

Merged weights are rounded. In bfloat16, with 8 significant bits, a correction much smaller than its weight is lost.
Therefore three things are checked: each merged matrix before rounding against its adapter, in float32, with a small
tolerance; the share of the correction that remains after rounding; and the merged model's logits against those of the
model with the adapter.

An adapter trained on a quantized base has also learned to correct the quantization error. Merged into the base as
stored, it gives another model than the trained one; `MergeReport.from_trained` measures the difference.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llamarium.adapters.lora import Adapted, LoRALinear, meta_linear, rows_of
from llamarium.adapters.lora_embedding import LoRAEmbedding
from llamarium.adapters.modules import load_adapter
from llamarium.errors import TrainingError, escape, warn_caller
from llamarium.model import LlamaForCausalLM
from llamarium.quant.base import QuantizedEmbedding, QuantizedLinear

# Maximum difference of logits relative to their norm: several times the rounding error of a model with 30 layers in
# these dtypes (3.7 % in bfloat16, 0.4 % in float16).
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.04, torch.bfloat16: 0.2}
FULLY_KEPT, _MIN_KEPT = 0.9, 0.5
_NUM_PROBES = 64
_NUM_VECTORS = 8
_PRODUCT_TOLERANCE = 1e-5  # for one matrix in float32; another order of summation gives 1e-6


@dataclass(frozen=True, slots=True)
class MergeReport:
    """Measurements of a merge.

    Attributes:
        kept: Share of the correction that remains in the merged weights; 1 without rounding.
        effect: Change of the logits of some random tokens by the adapter, relative to their norm.
        difference: Difference between the merged model's logits and those with the adapter, relative to their norm.
        tolerance: Maximum of `difference`.
        trained_over: Type of the base in training: "stored", as in its files, or the type that it was quantized to,
            such as "NF4"; None if the adapter does not record it.
        merged_onto: Type of the base that the adapter was merged into, in the same terms.
        from_trained: Difference between the merged model's logits and those of the adapter on the base that it was
            trained on; None if that base is not known.
    """

    kept: float
    effect: float
    difference: float
    tolerance: float
    trained_over: str | None = None
    merged_onto: str = "stored"
    from_trained: float | None = None


@torch.no_grad()
def adapted_logits(model: LlamaForCausalLM, folder: Path, *, check_base: bool = True) -> Tensor:
    """Apply an adapter to its base, in place, and return the logits that a merge is compared with."""
    load_adapter(model, folder, check_base=check_base)
    return _probe(model).cpu()


@torch.no_grad()
def merge_adapter(
    model: LlamaForCausalLM, folder: Path, *, check_base: bool = True, trained: Tensor | None = None
) -> MergeReport:
    """Apply an adapter to its base, merge it in place, and compare the merged model with the adapter.

    A UserWarning is issued if more than a tenth of the correction is lost in rounding.

    Args:
        model: The base, plain or quantized; not quantized afterwards, in the same dtype.
        folder: Folder of the adapter.
        check_base: Check that the model is the adapter's base.
        trained: `adapted_logits` of the base as it was in training, if that differs from `model`.

    Raises:
        TrainingError: If more than half of the correction is lost, or the merged model's logits differ too much.
        LlamariumError: As `load_adapter`.
    """
    base = _probe(model)
    load_adapter(model, folder, check_base=check_base)
    adapted = _probe(model)
    kept_share = _merge(model, model.dtype)
    merged = _probe(model)
    report = MergeReport(kept_share, _distance(adapted, base), _distance(merged, adapted), _TOLERANCES[model.dtype])
    if trained is not None:
        report = replace(report, from_trained=_distance(merged.cpu(), trained))
    dtype = str(model.dtype).removeprefix("torch.")
    noise = report.tolerance / 4  # twice the rounding error of the computation
    limit = min(report.tolerance, max(noise, report.effect / 2))
    if not report.difference <= limit:
        advice = "" if model.dtype is torch.float32 else "; merge in float32 (--dtype float32)"
        raise TrainingError(
            f"{escape(folder)}: the merged model's logits are {report.difference:.2%} away from the adapter's, which "
            f"itself moves them by {report.effect:.2%}; expected at most {limit:.2%} in {dtype}{advice}"
        )
    if kept_share < FULLY_KEPT:
        lost = (
            f"{escape(folder)}: only {kept_share:.0%} of what was learned is left in weights rounded to {dtype}; "
            "merge in float32 (--dtype float32)"
        )
        if kept_share < _MIN_KEPT:
            raise TrainingError(lost)
        warn_caller(lost)
    return report


def _probe(model: LlamaForCausalLM) -> Tensor:
    """Return the logits of a fixed sequence of random tokens, float32 (1, T, V)."""
    count = min(_NUM_PROBES, model.config.max_position_embeddings)
    drawn_1T = torch.randint(model.config.vocab_size, (1, count), generator=torch.Generator().manual_seed(0))
    return model(drawn_1T.to(model.device)).float()


def _distance(logits: Tensor, reference: Tensor) -> float:
    """Return the norm of the difference relative to the reference's norm, without means, which softmax ignores."""
    centred = reference - reference.mean(dim=-1, keepdim=True)
    difference = logits - reference
    difference = difference - difference.mean(dim=-1, keepdim=True)
    return (difference.norm() / centred.norm()).item()  # sync: once, at the end


def merge_adapters(model: LlamaForCausalLM, dtype: torch.dtype | None = None) -> LlamaForCausalLM:
    """Merge the adapters into the weights and dequantize quantized weights, in place; return the frozen model.

    `dtype` is that of the result, by default the model's; sums are in float32. TrainingError if the products of a
    merged matrix differ from its adapter's; the matrices before it are merged then.
    """
    _merge(model, dtype or model.dtype)
    return model


@torch.no_grad()
def _merge(model: LlamaForCausalLM, dtype: torch.dtype) -> float:
    """Merge in place and return the share of the correction that remains after rounding."""
    kinds = (*get_args(Adapted), QuantizedLinear, QuantizedEmbedding)
    # Names, not modules: a list of modules would keep every packed weight alive until the end.
    names = [name for name, module in model.named_modules() if isinstance(module, kinds)]
    kept = total = 0.0
    if isinstance(model.lm_head, LoRALinear) or isinstance(model.model.embed_tokens, LoRAEmbedding):
        # merged, the head is no longer the embedding table
        model.config = replace(model.config, tie_word_embeddings=False)
    for name in names:
        if name.endswith(".base_layer"):  # merged with its adapter
            continue
        module = model.get_submodule(name)
        if isinstance(module, LoRALinear):
            _check_products(name, module)
            weight, part, squares = _merged(module, dtype)
            kept, total = kept + part, total + squares
            model.set_submodule(name, _linear(weight, module.base_layer))
        elif isinstance(module, LoRAEmbedding):
            weight, part, squares = _merged(module, dtype)
            kept, total = kept + part, total + squares
            model.set_submodule(name, nn.Embedding.from_pretrained(weight))
        elif isinstance(module, QuantizedEmbedding):
            model.set_submodule(name, nn.Embedding.from_pretrained(module.dequantize(dtype)))
        elif name == "lm_head" and model.config.tie_word_embeddings:
            model.lm_head = meta_linear(model.config.hidden_size, model.config.vocab_size)  # until it is tied, below
        else:
            assert isinstance(module, QuantizedLinear)
            model.set_submodule(name, _linear(module.dequantize(dtype), module))
    model.tie_weights()
    model.to(dtype).requires_grad_(False).eval()
    return kept / total if total else 1.0


def _merged(adapted: Adapted, dtype: torch.dtype) -> tuple[Tensor, float, float]:
    """Return the merged weight, and the sums of r c and c c, where c is the correction and r the rounded correction."""
    if isinstance(adapted, LoRAEmbedding):
        shape, device = (adapted.num_embeddings, adapted.embedding_dim), adapted.lora_embedding_A.device
    else:
        shape, device = (adapted.out_features, adapted.in_features), adapted.lora_A.weight.device
    weight = torch.empty(shape, dtype=dtype, device=device)
    kept = total = 0.0
    for start, stop, rows in adapted.merged_rows():
        base = adapted.base_rows(start, stop)
        weight[start:stop] = rows
        correction, rounded = rows - base, weight[start:stop].float() - base
        kept += (rounded * correction).sum().item()  # sync: twice per chunk, once per merge
        total += correction.square().sum().item()
    return weight, kept, total


def _check_products(name: str, linear: LoRALinear) -> None:
    """Compare products with the merged matrix before rounding to those of the adapter, in float32."""
    x = torch.randn(_NUM_VECTORS, linear.in_features, generator=torch.Generator().manual_seed(0))
    x = x.to(linear.lora_A.weight.device)
    chunks = ((F.linear(x, rows_of(linear.base_layer, i, j)), F.linear(x, rows)) for i, j, rows in linear.merged_rows())
    base, merged = (torch.cat(parts, dim=1) for parts in zip(*chunks, strict=True))
    low = F.linear(x, linear.lora_A.weight) * linear.scale
    expected = base + F.linear(low, linear.lora_B.weight)
    if linear.lora_magnitude_vector is not None:
        expected *= linear.lora_magnitude_vector / linear.row_norms()
    off, length = (merged - expected).norm().item(), expected.norm().item()  # sync: once per matrix
    if not off <= _PRODUCT_TOLERANCE * length:
        raise TrainingError(
            f"{name}: products with the merged matrix are {off:.3g} away from the adapter's, of length {length:.3g}; "
            f"expected at most {_PRODUCT_TOLERANCE:g} of it"
        )


def _linear(weight: Tensor, base: nn.Module) -> nn.Linear:
    """Return a Linear with a merged or dequantized weight, and its base's bias."""
    linear = meta_linear(weight.shape[1], weight.shape[0])
    linear.weight = nn.Parameter(weight, requires_grad=False)
    bias = getattr(base, "bias", None)
    if isinstance(bias, Tensor):
        linear.bias = nn.Parameter(bias.detach().to(weight.dtype), requires_grad=False)
    return linear
