"""Preference training: what `finetune` prepares, with pairs for rows and `Preference` for what is learned."""

from dataclasses import replace
from pathlib import Path

from llamarium.errors import TrainingError
from llamarium.tokenizer.base import Tokenizer
from llamarium.train import finetune
from llamarium.train.config import DPOConfig, FinetuneConfig
from llamarium.train.data.pairs import PairRows
from llamarium.train.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from llamarium.train.preference import Preference, set_reference
from llamarium.train.setup import Setup


def prepare(config: DPOConfig, process_group: ProcessGroup = SINGLE_PROCESS) -> Setup:
    """Load the base and the pairs, put the adapters on, and measure the reference where it will not be at hand.

    Args:
        config: The settings.
        process_group: The processes that train together; one.

    Raises:
        LlamariumError: If the base or the data cannot be read, or the settings do not fit together.
    """
    if process_group.world_size > 1:
        raise TrainingError("dpo trains in one process, as its reference is the same model; start it without torchrun")
    setup = finetune.prepare(config, process_group, split_pairs)
    if config.method == "full":
        for rows in (setup.train, setup.validation):
            if isinstance(rows, PairRows):
                set_reference(rows, setup.model, config.batch_rows)
    return replace(setup, objective=Preference(config.beta))


def read_pair_rows(config: FinetuneConfig, tokenizer: Tokenizer) -> PairRows:
    """Read the pairs and pack them into rows.

    Raises:
        TrainingError: If there are none, or one is too long or malformed.
    """
    return PairRows.from_file(
        Path(config.data).expanduser(),
        tokenizer,
        config.context,
        seed=config.seed,
        too_long=config.too_long,
        chat=config.chat_format != "none",
    )


def split_pairs(config: FinetuneConfig, tokenizer: Tokenizer) -> tuple[PairRows, PairRows | None]:
    """Read the pairs, and hold out those that validate."""
    rows = read_pair_rows(config, tokenizer)
    return rows.split(config.validation) if config.validation > 0 else (rows, None)
