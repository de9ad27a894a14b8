"""A prepared run, and settings that are resolved while preparing it.

`pretrain.prepare` and `finetune.prepare` return a `Setup`; `run` trains it.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from llamarium.config import ModelConfig
from llamarium.cost import count_parameters
from llamarium.kernels.cpu_half import cpu_has_native_bf16
from llamarium.model import LlamaForCausalLM
from llamarium.quant.base import QuantizedLinear
from llamarium.runtime.device import choose_device
from llamarium.tokenizer.base import Tokenizer
from llamarium.train.choices import OptimizerName
from llamarium.train.config import EPOCHS_COUNTED, GRPOConfig, PretrainConfig, RunConfig
from llamarium.train.data.batch import Rows
from llamarium.train.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from llamarium.train.objectives.base import NEXT_TOKEN, Objective, Trunk
from llamarium.train.rewards.rollouts import Rollouts
from llamarium.train.step import causal_trunk

_Config = TypeVar("_Config", bound=RunConfig)

_SIDE = 512  # size of the timed matrices: 1 to 3 ms in float32
_MUON_UP_TO = 11_000_000  # parameters of the largest model for which Muon was measured to be better
_WORTH = 1.25  # required speedup of bfloat16 products, as a step does more than matrix products


@dataclass(frozen=True, slots=True)
class Setup:
    """A prepared run; the model is on its device, with trainable weights in float32.

    Attributes:
        tokenizer: Tokenizer for samples; it is saved with the model.
        save: Writes the model into a checkpoint's folder.
        restore: Loads the model from a checkpoint's folder.
        chat: True if samples answer the prompt as a dialog instead of continuing it.
        optimizer_reason: Why this optimizer was chosen; empty if it was given.
        rollouts: Samples the batches of each step; None if they are rows of the data.
        threads: Number of threads of the first run in a comparison of speeds; None if this is the first.
    """

    config: RunConfig
    model: LlamaForCausalLM
    tokenizer: Tokenizer
    train: Rows
    validation: Rows | None
    save: Callable[[Path], None]
    restore: Callable[[Path], None]
    chat: bool = False
    trunk: Trunk = causal_trunk
    objective: Objective = NEXT_TOKEN
    optimizer_reason: str = ""
    process_group: ProcessGroup = SINGLE_PROCESS
    rollouts: Rollouts | None = None
    threads: int | None = None


def describe(setup: Setup) -> dict[str, Any]:
    """Return the description of a run in its first event, as JSON values."""
    parameters = {id(p): p for p in setup.model.parameters()}.values()
    packed = {
        id(m.weight): m.out_features * m.in_features for m in setup.model.modules() if isinstance(m, QuantizedLinear)
    }
    return {
        "settings": dataclasses.asdict(setup.config),
        "model": setup.model.config.to_hf(),
        "parameters": sum(p.numel() for p in parameters) + sum(packed.values()),
        "trainable": sum(p.numel() for p in parameters if p.requires_grad),
        "rows": setup.train.num_rows(0),
        "data": dict(setup.train.about),
        "tokens_per_step": setup.config.rows_per_step * setup.train.context,
        "device": str(setup.model.device),
        "optimizer_reason": setup.optimizer_reason,
        **({} if setup.rollouts is None else {"sampler": setup.rollouts.sampler}),
    }


def with_precision(config: _Config, process_group: ProcessGroup) -> _Config:
    """Resolve the precision "auto": bfloat16 on a CPU where it is faster, else float32.

    Several processes use float32, as their measurements could differ.
    """
    if config.precision != "auto":
        return config
    is_faster = process_group.world_size == 1 and choose_device(config.device) == "cpu" and multiplies_bfloat16()
    return replace(config, precision="bfloat16" if is_faster else "float32")


def with_steps(config: _Config, rows: Rows) -> _Config:
    """Convert `epochs` or `tokens` to optimizer steps, given the training rows."""
    if config.epochs is None and config.tokens is None:
        return config
    per_step = config.rows_per_step
    if config.tokens is not None:
        steps = math.ceil(config.tokens / (per_step * rows.context))
    else:
        assert config.epochs is not None
        if isinstance(config, GRPOConfig):
            per_step //= config.group_size  # rows of the data are prompts
        steps = math.ceil(_rows_of_epochs(rows, config.epochs) / per_step)
    return replace(config, steps=max(1, steps), epochs=None, tokens=None)


def _rows_of_epochs(rows: Rows, epochs: float) -> float:
    """Return the number of rows in some epochs, which differ between epochs if rows are packed.

    Up to `EPOCHS_COUNTED` epochs are packed and counted; more are estimated from their mean.
    """
    whole, part = divmod(epochs, 1)
    if whole >= EPOCHS_COUNTED:
        return epochs * sum(rows.num_rows(epoch) for epoch in range(EPOCHS_COUNTED)) / EPOCHS_COUNTED
    num_rows = sum(rows.num_rows(epoch) for epoch in range(int(whole)))
    return num_rows + part * rows.num_rows(int(whole)) if part else num_rows


def with_optimizer(
    config: PretrainConfig, shape: ModelConfig, group: ProcessGroup, before: Mapping[str, Any]
) -> tuple[PretrainConfig, str]:
    """Fill in the optimizer and the learning rate, and return the settings and the reason ("" if it was given).

    `before` are the settings of the resumed run, which take precedence over the measured default; empty for a new run.
    """
    if config.optimizer in (None, before.get("optimizer")):
        rate = config.learning_rate or before.get("learning_rate")
        config = replace(config, optimizer=before.get("optimizer"), learning_rate=rate)
    is_small = count_parameters(shape).total <= _MUON_UP_TO
    name, reason = (config.optimizer, "") if config.optimizer else _measured_optimizer(config, is_small, group)
    rate = config.learning_rate or (1e-4 if config.model else 8e-3 if name == "muon" and is_small else 1e-3)
    return replace(config, optimizer=name, learning_rate=rate), reason


def _measured_optimizer(config: PretrainConfig, is_small: bool, group: ProcessGroup) -> tuple[OptimizerName, str]:
    """Choose Muon where it was measured to be better and is fast (docs/decisions/0042), and return the reason."""
    if config.model:
        return "adamw", "going on from a model"
    if config.learning_rate:
        return "adamw", "a rate alone is AdamW's"
    if not is_small:
        return "adamw", f"more than {_MUON_UP_TO // 10**6}M parameters"
    if group.world_size > 1 or choose_device(config.device) != "cpu" or not cpu_has_native_bf16():
        return "adamw", "Muon was measured in one process on a CPU with instructions for bfloat16"
    return "muon", "small and from scratch; --optimizer adamw for AdamW"


@functools.cache
def multiplies_bfloat16() -> bool:
    """Return whether bfloat16 matrix products are faster than float32 on this CPU, by timing some (milliseconds)."""
    x = torch.ones(_SIDE, _SIDE)
    seconds = {torch.float32: float("inf"), torch.bfloat16: float("inf")}
    for _ in range(5):  # alternate and take the fastest, as other programs may use the CPU
        for dtype, rounded in ((dtype, x.to(dtype)) for dtype in seconds):
            begin = time.perf_counter()
            torch.mm(rounded, rounded)
            seconds[dtype] = min(seconds[dtype], time.perf_counter() - begin)
    return seconds[torch.float32] > _WORTH * seconds[torch.bfloat16]
