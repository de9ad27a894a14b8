"""A prepared run, and the events that it emits. `pretrain` and `finetune` make it; `run` consumes it."""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

from llamarium.config import ModelConfig
from llamarium.cost import count_parameters
from llamarium.model import LlamaForCausalLM
from llamarium.runtime.device import choose_device
from llamarium.tokenizer.base import Tokenizer
from llamarium.train.config import PretrainConfig, RunConfig
from llamarium.train.data.batch import Rows
from llamarium.train.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from llamarium.train.objectives.base import NEXT_TOKEN, Objective, Trunk
from llamarium.train.rewards.rollouts import Rollouts
from llamarium.train.step import causal_trunk

_Config = TypeVar("_Config", bound=RunConfig)

_SIDE = 512  # of the matrices that are multiplied: 1 to 3 ms in float32
_MUON_UP_TO = 11_000_000  # parameters that models had in which it was measured to be better
_WORTH = 1.25  # times as fast has bfloat16 to be: a step is more than its products


@dataclass(frozen=True, slots=True)
class Setup:
    """A prepared run; the model is on its device, float32 where it is trained.

    Attributes:
        tokenizer: For samples, and saved with the model.
        save: Writes the model into a checkpoint's folder.
        restore: Loads it from there.
        chat: Samples answer the prompt, as a dialog, instead of continuing it.
        optimizer_why: Why this optimizer was chosen; empty where it was given.
        rollouts: Makes the batches of each step; None where they are rows of the data.
        threads: Number of threads of the first of several runs whose speeds are compared; None for the first.
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
    optimizer_why: str = ""
    process_group: ProcessGroup = SINGLE_PROCESS
    rollouts: Rollouts | None = None
    threads: int | None = None


def with_precision(config: _Config, process_group: ProcessGroup) -> _Config:
    """Return settings whose precision is no longer "auto": bfloat16 on a CPU where that is faster, else float32.

    Several processes could measure differently, and take float32.
    """
    if config.precision != "auto":
        return config
    return replace(config, precision="bfloat16" if _fast_bfloat16(config, process_group) else "float32")


def _fast_bfloat16(config: RunConfig, process_group: ProcessGroup) -> bool:
    return process_group.world_size == 1 and choose_device(config.device) == "cpu" and multiplies_bfloat16()


def with_optimizer(config: PretrainConfig, shape: ModelConfig, group: ProcessGroup) -> tuple[PretrainConfig, str]:
    """Return settings with the optimizer and the rate that were left out, and why it is this one; "" if it was given.

    Where both were, a model from scratch has Muon up to the size that was measured, on a CPU with fast bfloat16, in
    which Muon multiplies (docs/decisions/0042).
    """
    size = count_parameters(shape).total
    against = {
        "going on from a model": config.model,
        "a rate alone is AdamW's": config.learning_rate,
        f"more than {_MUON_UP_TO // 10**6}M parameters": size > _MUON_UP_TO,
        "Muon needs one process on a CPU with fast bfloat16": not _fast_bfloat16(config, group),
    }
    given, small = config.optimizer or config.muon_learning_rate, "small and from scratch; --optimizer adamw for AdamW"
    why = "" if given else next((reason for reason, holds in against.items() if holds), small)
    name = config.optimizer or ("adamw" if why in against else "muon")
    rate = config.learning_rate or (1e-4 if config.model else 8e-3 if name == "muon" and size <= _MUON_UP_TO else 1e-3)
    return replace(config, optimizer=name, learning_rate=rate), why


@functools.cache
def multiplies_bfloat16() -> bool:
    """Whether products of bfloat16 are faster here, by instructions for them: some are timed, in milliseconds."""
    x = torch.ones(_SIDE, _SIDE)
    seconds = {torch.float32: float("inf"), torch.bfloat16: float("inf")}
    for _ in range(5):  # in turn, and the fastest: others may compute at the same time
        for dtype, rounded in ((dtype, x.to(dtype)) for dtype in seconds):
            begin = time.perf_counter()
            torch.mm(rounded, rounded)
            seconds[dtype] = min(seconds[dtype], time.perf_counter() - begin)
    return seconds[torch.float32] > _WORTH * seconds[torch.bfloat16]
