"""Whether a model is the base that an adapter was trained on, and does not contain the adapter already.

An adapter says nothing without its base: on another base of the same shape it fits and is noise, and on one that it was
merged into it moves the weights a second time. Three things of the base are kept in the header of an adapter's file,
where other readers pass over them:

- `llamarium_base`, a hash of what quantizing the Linears does not change: the norms, some of the embedding's rows.
- `llamarium_base_linears`, how the Linears were stored, and a hash of some rows of each. A merge changes these. Hashes
  compare only where the Linears are stored alike: a base in NF4 is the same base, and has other numbers.
- `llamarium_base_projection`, <W, C> / <C, C>, where C is scale B A of all adapters together. A merged model has
  W + C in the place of W, by which the number grows by 1, however it is stored: quantization adds noise that knows
  nothing of C. So it tells a merged model from its base where hashes cannot. Both numbers are kept: the base's and the
  merged model's.
"""

import hashlib
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from llamarium.errors import CheckpointError, escape, show_value
from llamarium.model import LlamaForCausalLM
from llamarium.model.norm import LlamaRMSNorm
from llamarium.quant.base import QuantizedLinear
from llamarium.train.adapters.lora import ALL_PROJECTIONS, LoRALinear, lora_linears, rows_of

BASE, LINEARS, PROJECTION = "llamarium_base", "llamarium_base_linears", "llamarium_base_projection"
_EMBEDDING_ROWS = 256
_LINEAR_ROWS = 8
# What quantization moves a weight by, as a share of the weights' own size: about 0.1 in 4 bits. Six of them are noise.
_QUANTIZATION_NOISE = 0.6


def base_fingerprint(model: LlamaForCausalLM) -> str | None:
    """Return SHA-256, hex, of what quantizing the Linears does not change: the norms, and some of the embedding's rows.

    Values are taken as bfloat16, in which a model is the same whether it was loaded in bfloat16 or float32. In float16
    small numbers have lost what bfloat16 keeps: there is no fingerprint then, and None is returned.
    """
    if model.dtype is torch.float16:
        return None
    step = max(1, model.config.vocab_size // _EMBEDDING_ROWS)
    with torch.no_grad():
        rows = model.model.embed_tokens(torch.arange(0, model.config.vocab_size, step, device=model.device))
    return _sha256(iter((rows, *(module.weight for module in model.modules() if isinstance(module, LlamaRMSNorm)))))


def linears_fingerprint(model: LlamaForCausalLM) -> str:
    """Return how the Linears are stored, and SHA-256, hex, of some rows of each: "plain:0123...".

    Adapters on them do not count. The head does not, either: tied, it is the embedding; and adapters seldom touch it.
    """
    linears = list(_base_linears(model))
    stored = "+".join(sorted({_storage(linear, model.dtype) for linear in linears}))
    return f"{stored}:{_sha256(_sampled(linears))}"


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
        num_rows = cast(int, linear.out_features)
        for row in range(0, num_rows, max(1, num_rows // _LINEAR_ROWS)):
            yield rows_of(linear, row, row + 1)


@torch.no_grad()
def _sha256(tensors: Iterator[Tensor]) -> str:
    digest = hashlib.sha256()
    for values in tensors:
        digest.update(values.detach().to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def same_linears(saved: str, found: str) -> bool | None:
    """Tell whether two `linears_fingerprint`s are of the same weights; None where they are stored otherwise."""
    if saved == found:
        return True
    return False if saved.rpartition(":")[0] == found.rpartition(":")[0] else None


# --- the correction's own direction -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Projection:
    """How much of the adapters' correction C lies in the weights W.

    Attributes:
        share: <W, C> / <C, C>; 0 where C is nothing.
        merged: What it would be of the merged weights: 1 more, but for DoRA, which scales their rows.
        noise: How far quantizing W may move it.
    """

    share: float
    merged: float
    noise: float


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
    if not correction:  # nothing is learned yet
        return Projection(0.0, 0.0, 0.0)
    noise = _QUANTIZATION_NOISE * math.sqrt(base / count / correction)
    return Projection(inner / correction, inner_merged / correction, noise)


# --- the check --------------------------------------------------------------------------------------------------------


def check_base(model: LlamaForCausalLM, folder: Path, written: Mapping[str, str], name: object) -> None:
    """Hold a model with an adapter on it against what the adapter's file says of its base.

    Warns where the file says too little, or the base is in float16.

    Args:
        model: With the adapter.
        folder: The adapter's, for messages.
        written: The header of its file.
        name: Of the base that it was trained on.

    Raises:
        CheckpointError: If it is another base, or contains the adapter already.
    """
    if (expected := written.get(BASE)) is None:
        return
    found = base_fingerprint(model)
    if found is None:
        _warn("in float16 a base has no fingerprint: whether the adapter is its own is not checked")
    elif found != expected:
        raise _another(folder, name, expected, found)
    if (linears := written.get(LINEARS)) is None:
        _warn(
            f"{escape(folder)}: was saved by a version that did not note the base's Linears; whether the base contains "
            "this adapter already (it was merged into it) is not checked"
        )
        return
    here = linears_fingerprint(model)
    if (same := same_linears(linears, here)) is True:
        return
    contained = _is_contained(model, written.get(PROJECTION))
    if contained:
        raise CheckpointError(
            f"{escape(folder)}: the base contains this adapter already, as it was merged into it; once more would move "
            f"the weights twice as far. Take the model as it is, or load the base itself ({show_value(name)})"
        )
    if same is False:
        raise _another(folder, name, linears.rpartition(":")[2], here.rpartition(":")[2])
    if contained is None:
        _warn(
            f"{escape(folder)}: the base is stored otherwise than in training; whether it contains this adapter "
            "already is not checked"
        )


def _is_contained(model: nn.Module, written: str | None) -> bool | None:
    """Tell whether a base has the correction of the adapters on it; None where that cannot be told."""
    try:
        before, merged = map(float, (written or "").split())
    except ValueError:
        return None
    now = projection(model)
    if now is None or not math.isfinite(before + merged) or now.noise > abs(merged - before) / 2:
        return None
    return abs(now.share - merged) < abs(now.share - before)


def _another(folder: Path, name: object, expected: str, found: str) -> CheckpointError:
    return CheckpointError(
        f"{escape(folder)}: the adapter was trained on another base ({show_value(name)}, fingerprint "
        f"{escape(expected, 12)}; this one has {escape(found, 12)}); load that base"
    )


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=4)
