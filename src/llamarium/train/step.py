"""The training step and the validation.

A step accumulates the gradients of several micro-batches and updates the weights once. The sum of the losses is divided
by the number of learned tokens (or pairs) of the whole step, so k micro-batches give the same gradient as one large
batch, even with different numbers of learned tokens. The loss is an `Objective`.
"""

import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.optim import Optimizer

from llamarium.attention.base import Attend
from llamarium.attention.training import TrainingAttend, attend_rows
from llamarium.kernels import cpu_float32, cpu_training, native
from llamarium.kernels.cpu_layer import Layer
from llamarium.kernels.cpu_training import DTYPES, are_plain, products_dtype
from llamarium.model import (
    METHODS,
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaMLP,
    LlamaRMSNorm,
    Rotary,
    SiLUActivation,
)  # fmt: skip
from llamarium.train.data.batch import IGNORED, AnswerBatch, Rows, TrainingBatch
from llamarium.train.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from llamarium.train.objectives.base import NEXT_TOKEN, Objective, Trunk

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PARTS = [LlamaAttention, *[nn.Linear] * 4, LlamaMLP, *[nn.Linear] * 3, SiLUActivation, LlamaRMSNorm, LlamaRMSNorm]


SkipReason = Literal["not finite", "no labels", "no signal"]
"""Why an update was skipped: the gradient is not finite, no token has a label, or the gradient is zero."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a training step.

    Attributes:
        loss: Mean of the objective before the update (for `NEXT_TOKEN`, -log P per learned token in nats); NaN if no
            token has a label.
        grad_norm: Norm of all gradients, before clipping.
        num_tokens: Input tokens of the step, over all processes.
        skip_reason: Why the update was skipped; None if the weights were updated.
        metrics: Means of the objective's other metrics, by name.
    """

    loss: float
    grad_norm: float
    num_tokens: int
    skip_reason: SkipReason | None
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def updated(self) -> bool:
        """True if the weights were updated."""
        return self.skip_reason is None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Result of a validation: mean of the objective (NaN if no token has a label), and of its other metrics by name."""

    loss: float
    metrics: Mapping[str, float]


def causal_trunk(model: LlamaForCausalLM, batch: TrainingBatch) -> Tensor:
    """Compute hidden states with causal attention within each segment."""
    positions = batch.positions_BT if batch.segments_BT is not None else batch.positions_BT[:1]
    attend = TrainingAttend(segments_BT=batch.segments_BT, window=model.config.sliding_window)
    return model.model(batch.ids_BT, positions, attend)


def bidirectional_trunk(model: LlamaForCausalLM, batch: TrainingBatch) -> Tensor:
    """Compute hidden states like an encoder: each token attends to its whole segment, including its label."""
    attend = TrainingAttend(segments_BT=batch.segments_BT, bidirectional=True)
    return model.model(batch.ids_BT, batch.positions_BT, attend)


def checkpoint_layers(model: LlamaForCausalLM) -> None:
    """Enable activation checkpointing in every layer, in place: activations are recomputed in the backward pass."""
    for layer in model.model.layers:
        layer.forward = partial(cpu_training.checkpointed, layer.forward)


@torch.enable_grad()  # the caller may have disabled gradients
def train_step(
    model: LlamaForCausalLM,
    optimizers: Sequence[Optimizer],
    batches: Sequence[TrainingBatch],
    *,
    max_grad_norm: float = 1.0,
    precision: Literal["float32", "bfloat16"] = "float32",
    trunk: Trunk = causal_trunk,
    objective: Objective = NEXT_TOKEN,
    process_group: ProcessGroup = SINGLE_PROCESS,
    has_signal: bool = True,
) -> StepResult:
    """Accumulate the gradients of some micro-batches, and update the float32 weights once.

    If there is a `SkipReason`, no optimizer is stepped, so weight decay and momentum do not change the weights either.

    Args:
        model: The model, on any device.
        optimizers: Optimizers of its trainable parameters.
        batches: This process's shard of the step's rows.
        max_grad_norm: Gradients are clipped to this norm; 0 disables clipping.
        precision: Precision of matrix products.
        trunk: Computes the hidden states.
        objective: The loss.
        process_group: The processes that train together.
        has_signal: False if the true gradient is known to be zero, so that a computed one is only rounding.
    """
    tokens, terms = sum(batch.ids_BT.numel() for batch in batches), sum(map(objective.count, batches))
    num_tokens, count = process_group.all_reduce_sum(tokens, terms)
    sums = _Sums(model.device)
    for batch in batches:
        here = batch.to(model.device)
        as_pass = isinstance(batch, AnswerBatch) and batch.exact_N is None  # bit-identical to the sampling pass
        with computing_in(model.device, precision, as_pass=as_pass):
            loss = process_group.forward(partial(sums.take, objective, model, here, trunk)) / (count or 1)
        loss.backward()
    parameters = [p for p in model.parameters() if p.grad is not None]
    norm = process_group.clip_grad_norm(parameters, max_grad_norm or math.inf)
    reason = _skip_reason(norm, count, has_signal=has_signal)
    for optimizer in optimizers:
        if reason is None:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    means = sums.means(process_group, count)
    return StepResult(means.loss, norm, int(num_tokens), reason, means.metrics)


def _skip_reason(norm: float, count: float, *, has_signal: bool) -> SkipReason | None:
    """Return why the update must be skipped, or None."""
    if not math.isfinite(norm):
        return "not finite"
    if not count > 0:
        return "no labels"
    return None if has_signal and norm > 0 else "no signal"


class _Sums:
    """Sums of an objective over several batches."""

    def __init__(self, device: torch.device) -> None:
        wide = torch.float32 if device.type == "mps" else torch.float64  # Metal has no float64
        self.loss = torch.zeros((), device=device, dtype=wide)
        self.metrics: dict[str, Tensor] = {}

    def take(self, objective: Objective, model: LlamaForCausalLM, batch: TrainingBatch, trunk: Trunk) -> Tensor:
        """Return the summed loss of a batch, and add it and its metrics."""
        loss, metrics = objective.loss_sum(model, batch, trunk)
        self.loss += loss.detach()
        for name, value in metrics.items():
            before = self.metrics.get(name, torch.zeros_like(value))
            total = torch.maximum(before, value) if _is_largest(name) else before + value
            self.metrics[name] = total.detach()
        return loss

    def means(self, process_group: ProcessGroup, count: float) -> Evaluation:
        """Return the means over the batches of all processes; maxima are those of this process."""
        values = [float(value) for value in (self.loss, *self.metrics.values())]  # sync: the metrics are reported
        loss, *others = (value / count if count else math.nan for value in process_group.all_reduce_sum(*values))
        means = dict(zip(self.metrics, others, strict=True))
        return Evaluation(loss, means | {name: float(v) for name, v in self.metrics.items() if _is_largest(name)})


def _is_largest(name: str) -> bool:
    """Return whether a metric is a maximum over batches rather than a sum, by its name."""
    return name.startswith("largest_")


def measured_rows(rows: Rows, max_rows: int) -> range:
    """Return the indices of up to `max_rows` evenly spaced rows of epoch 0; 0 means all."""
    every = range(rows.num_rows(0))
    return every[:: max(1, math.ceil(len(every) / max_rows)) if max_rows else 1]


@torch.no_grad()
def measure(
    model: LlamaForCausalLM,
    rows: Rows,
    *,
    batch_rows: int,
    max_rows: int = 0,
    precision: Literal["float32", "bfloat16"] = "float32",
    trunk: Trunk = causal_trunk,
    objective: Objective = NEXT_TOKEN,
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> Evaluation:
    """Return the mean of an objective over up to `max_rows` evenly spaced rows of epoch 0 (0 means all).

    Other arguments are those of `train_step`. The model is in evaluation mode during the measurement.
    """
    was_training = model.training
    model.eval()
    chosen, sums, count = measured_rows(rows, max_rows), _Sums(model.device), 0
    for start in range(0, len(chosen), batch_rows):
        batch = _shard(rows, chosen[start : start + batch_rows], process_group)
        count += objective.count(batch)
        here = batch.to(model.device)
        with computing_in(model.device, precision):
            process_group.forward(partial(sums.take, objective, model, here, trunk))
    model.train(was_training)
    (total,) = process_group.all_reduce_sum(count)
    return sums.means(process_group, total)


def _shard(rows: Rows, indices: Sequence[int], process_group: ProcessGroup) -> TrainingBatch:
    """Return this process's shard of some rows; if it is empty, one row without labels."""
    if mine := indices[process_group.shard_idx :: process_group.num_shards]:
        return rows.batch(0, mine)
    batch = rows.batch(0, indices[:1])
    return replace(batch, labels_BT=torch.full_like(batch.labels_BT, IGNORED))


@contextmanager
def computing_in(
    device: torch.device, precision: Literal["float32", "bfloat16"], *, as_pass: bool = False
) -> Generator[None]:
    """Compute matrix products in this precision; on a CPU, other operations use the C kernels.

    With `as_pass`, float32 results are bit-identical to those of the inference kernels, for GRPO.
    """
    faster: dict[Any, Any] = {LlamaRMSNorm.forward: _rms_norm, LlamaMLP.gated: _swiglu, Rotary.rotate: _rotate}
    faster[attend_rows] = partial(attend_rows, as_pass=as_pass)
    if not as_pass:
        faster[LlamaDecoderLayer.forward] = compute_layer
    if as_pass or cpu_float32.is_needed():
        faster[F.linear] = partial(cpu_float32.linear, in_c=as_pass)
    half = torch.autocast(device.type, torch.bfloat16) if precision == "bfloat16" else nullcontext()
    with half, cpu_training.Replaced(faster) if device.type == "cpu" else nullcontext():
        yield


def _are_unchanged(modules: Iterable[nn.Module]) -> bool:
    """Return whether these modules have neither hooks nor replaced methods."""
    changes: list[Any] = [getattr(torch_module, f"_global{name}", None) for name in _HOOKS]
    changes += [vars(kind).get(name) is not function for kind, name, function in METHODS]
    for own in map(vars, modules):
        changes += [own[name] for name in _HOOKS] + [callable(value) for value in own.values()]
    return not any(changes)


def compute_layer(layer: LlamaDecoderLayer, x_BTD: Tensor, rotary: Rotary, attend: Attend) -> Any:
    """Compute a layer by the fused C kernel, (B, T, D).

    NotImplemented if a part of the layer is replaced, hooked or frozen, or if the kernel lacks its shapes or dtypes.
    """
    if type(attend) is not TrainingAttend or type(rotary) is not Rotary or x_BTD.dim() != 3:
        return NotImplemented
    parts, weights, angles = list(layer.modules()), list(layer.parameters()), (rotary.cos_BT1H, rotary.sin_BT1H)
    fits = [type(part) for part in parts] == [LlamaDecoderLayer, *_PARTS] and _are_unchanged(parts[1:])
    fits = fits and len(weights) == 9 and all(weight.requires_grad for weight in weights)
    fits = fits and are_plain(x_BTD, *angles, *weights) and products_dtype(x_BTD) in DTYPES
    if not fits or native.library() is None:
        return NotImplemented
    (rows, tokens, width), head_dim = x_BTD.shape, layer.self_attn.head_dim
    known = all(each.shape in ((1, tokens, 1, head_dim), (rows, tokens, 1, head_dim)) for each in angles)
    if not known or len({each.shape for each in angles}) > 1 or head_dim % 32 or width % 16 or weights[4].shape[0] % 16:
        return NotImplemented
    eps = layer.input_layernorm.eps, layer.post_attention_layernorm.eps
    mask = (*attend.kernel_mask(x_BTD.shape[:2]), False)
    return Layer.apply((head_dim, eps, mask), *(x.contiguous() for x in (x_BTD, *angles)), *weights)


def _rms_norm(norm: LlamaRMSNorm, x_BTD: Tensor) -> Any:
    return cpu_training.rms_norm(x_BTD, norm.weight, norm.eps)


def _swiglu(mlp: LlamaMLP, gate_BTF: Tensor, up_BTF: Tensor) -> Any:
    plain = type(mlp.act_fn) is SiLUActivation and _are_unchanged([mlp.act_fn])
    return cpu_training.swiglu(gate_BTF, up_BTF) if plain else NotImplemented


def _rotate(rotary: Rotary, x_BTNH: Tensor) -> Any:
    return cpu_training.rotate(x_BTNH, rotary.cos_BT1H, rotary.sin_BT1H)


def any_learned(rows: Rows) -> bool:
    """Return whether any token of epoch 0 has a label; reads a thousand rows at a time."""
    num_rows = rows.num_rows(0)
    starts = range(0, num_rows, 1000)
    return any(rows.batch(0, range(start, min(start + 1000, num_rows))).num_learned for start in starts)
