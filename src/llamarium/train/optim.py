"""Optimizers and learning-rate schedules.

AdamW moves every weight by about the learning rate, whatever the size of its gradient. Muon orthogonalizes the momentum
of a whole matrix, so that a step changes all directions equally; it is used for the layers' matrices, and AdamW for
embeddings, head and norms. Weight decay applies to matrices only: there is no reason for a norm's weight to be small.

Source: Loshchilov & Hutter 2019, "AdamW"; Jordan et al. 2024, "Muon", with Moonshot's scaling to AdamW's step size, so
that both can use one learning rate. For small models Muon's best learning rate is four times as high
(docs/decisions/0042).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from llamarium.checkpoints.checkpoint import list_some
from llamarium.errors import TrainingError, escape
from llamarium.train.choices import OptimizerName, ScheduleName
from llamarium.train.distributed.process_group import SINGLE_PROCESS, ProcessGroup

# The optimizer state of each parameter.
_ADAMW_FIELDS = ("step", "exp_avg", "exp_avg_sq")
_MUON_FIELDS = ("momentum_buffer",)


def make_optimizers(
    model: nn.Module,
    name: OptimizerName,
    *,
    learning_rate: float,
    weight_decay: float,
    betas: tuple[float, float],
    muon_learning_rate: float | None = None,
) -> list[Optimizer]:
    """Return the optimizers for a model's trainable parameters; a tied parameter is in exactly one of them, once.

    Args:
        model: The model.
        name: "adamw" for all parameters; "muon" for the layers' matrices, with AdamW for the rest.
        learning_rate: Peak learning rate.
        weight_decay: Weight decay of matrices.
        betas: Betas of AdamW.
        muon_learning_rate: Peak learning rate of Muon; None uses `learning_rate`.

    Raises:
        TrainingError: If no parameter is trainable.
    """
    named = [(key, p) for key, p in model.named_parameters() if p.requires_grad]
    if not named:
        raise TrainingError("no parameter is trainable; expected at least one")
    in_layers = [(key, p) for key, p in named if name == "muon" and p.ndim == 2 and ".layers." in f".{key}"]
    layer_keys = {key for key, _ in in_layers}
    rest = [(key, p) for key, p in named if key not in layer_keys]
    alike: dict[tuple[bool, object], list[nn.Parameter]] = {}  # differently sharded parameters need separate groups
    for _, p in rest:
        alike.setdefault((p.ndim < 2, getattr(p, "device_mesh", None)), []).append(p)
    groups = [
        {"params": some, "weight_decay": 0.0 if is_vector else weight_decay}
        for (is_vector, _), some in sorted(alike.items(), key=lambda item: item[0][0])
    ]
    fused = all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for _, p in rest)
    optimizers: list[Optimizer] = []
    if rest:
        optimizers.append(torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=fused))
    if in_layers:
        peak = learning_rate if muon_learning_rate is None else muon_learning_rate
        matrices = [p for _, p in in_layers]
        optimizers.append(
            torch.optim.Muon(matrices, lr=peak, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        )
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return optimizers


def set_learning_rate(optimizers: Sequence[Optimizer], factor: float) -> None:
    """Set every group's learning rate to its peak times `factor`."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * factor


def schedule(
    step: int, *, name: ScheduleName, warmup_steps: int, num_steps: int, final_ratio: float, decay_share: float = 0.2
) -> float:
    """Return the learning rate at a step, relative to its peak.

    After a linear warmup, "cosine" and "linear" decay to `final_ratio` at the end of the run; "wsd"
    (warmup-stable-decay) stays at the peak and decays linearly over the last `decay_share` of the run; "constant" stays
    at the peak.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    begin = warmup_steps if name != "wsd" else max(warmup_steps, round(num_steps * (1 - decay_share)))
    if name == "constant" or step < begin:
        return 1.0
    done = min(1.0, (step + 1 - begin) / max(1, num_steps - begin))
    left = (1 + math.cos(math.pi * done)) / 2 if name == "cosine" else 1 - done
    return final_ratio + (1 - final_ratio) * left


def optimizer_tensors(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """Return the optimizer state as tensors named "field/parameter"."""
    names = {id(p): key for key, p in model.named_parameters()}
    tensors: dict[str, Tensor] = {}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for field, value in state.items():
                tensors[f"{field}/{names[id(parameter)]}"] = torch.as_tensor(value)
    return tensors


def restore_optimizers(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    tensors: Mapping[str, Tensor],
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> None:
    """Restore the state from `optimizer_tensors`; TrainingError if it does not fit the parameters.

    `tensors` are unsharded, even if the parameters are sharded.
    """
    names = {id(p): key for key, p in model.named_parameters()}
    owner: dict[str, tuple[Optimizer, Tensor]] = {}
    for optimizer in optimizers:
        fields = _MUON_FIELDS if isinstance(optimizer, torch.optim.Muon) else _ADAMW_FIELDS
        every = [p for group in optimizer.param_groups for p in group["params"]]
        owner |= {f"{field}/{names[id(p)]}": (optimizer, p) for p in every for field in fields}
    if extra := sorted(tensors.keys() - owner.keys()):
        raise TrainingError(
            f"the optimizer's state has {list_some(extra)}, which belongs to no parameter of this model"
        )
    if missing := sorted(owner.keys() - tensors.keys()):
        raise TrainingError(f"the optimizer's state lacks {list_some(missing)}")
    for key, tensor in tensors.items():
        field, (optimizer, parameter) = key.partition("/")[0], owner[key]
        shape, dtype = ((), torch.float32) if field == "step" else (parameter.shape, parameter.dtype)
        least = -math.inf if field in ("exp_avg", "momentum_buffer") else 0.0
        if tensor.shape != shape or tensor.dtype != dtype:
            actual = f"{tensor.dtype} {tuple(tensor.shape)}"
            raise TrainingError(f"the optimizer's {escape(key)} is {actual}; expected {dtype} {tuple(shape)}")
        if not (tensor.isfinite() & (tensor >= least)).all():
            raise TrainingError(f"the optimizer's {escape(key)} has values that are NaN, infinite or negative")
        held: Any = tensor.to(parameter.device) if field == "step" else process_group.distribute(tensor, parameter)
        optimizer.state[parameter][field] = held
