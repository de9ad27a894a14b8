"""A prepared run, and the events that it emits. `pretrain` and `finetune` make it; `run` consumes it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamarium.model import LlamaForCausalLM
from llamarium.tokenizer.base import Tokenizer
from llamarium.train.config import RunConfig
from llamarium.train.data.batch import Rows
from llamarium.train.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from llamarium.train.objectives.base import NEXT_TOKEN, Objective, Trunk
from llamarium.train.step import causal_trunk

Event = Mapping[str, Any]
Emit = Callable[[Event], None]


def is_passing(event: Event) -> bool:
    """Whether an event only shows current activity and is not written to the journal."""
    return event["event"] == "progress"


@dataclass(frozen=True, slots=True)
class Setup:
    """A prepared run; the model is on its device, float32 where it is trained.

    Attributes:
        tokenizer: For samples, and saved with the model.
        save: Writes the model into a checkpoint's folder.
        restore: Loads it from there.
        chat: Samples answer the prompt, as a dialog, instead of continuing it.
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
    process_group: ProcessGroup = SINGLE_PROCESS
    threads: int | None = None
