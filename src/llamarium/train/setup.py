"""What a run works with, and what it tells of itself. `pretrain` and `finetune` make it; `run` uses it up."""

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
    """Tell whether an event is for who looks on at this moment, and is kept nowhere: what a run is doing right now."""
    return event["event"] == "progress"


@dataclass(frozen=True, slots=True)
class Setup:
    """What a run works with.

    Attributes:
        config: Its settings.
        model: On its device, float32 where it is trained.
        tokenizer: For samples, and saved with the model.
        train: What is learned.
        validation: What is measured with; None for nothing.
        save: Writes the model into the folder of a checkpoint.
        restore: Reads it back from there.
        chat: Samples answer the prompt, as a dialog, rather than continue it.
        trunk: How hidden states are computed.
        objective: What is made small.
        process_group: The processes that train together.
        threads: How many the first of several runs has computed with, whose speeds are compared; None where there was
            none before.
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
