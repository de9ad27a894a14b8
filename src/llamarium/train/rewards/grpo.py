"""GRPO: reinforcement learning from rewards of sampled answers.

A step is a rollout followed by updates. `group_size` answers per prompt are sampled from the current policy
(`rewards/rollouts.py`), rewarded (`rewards/functions.py`) and compared within their group; then the weights are updated
`num_iterations` times (`objectives/group_policy.py`). Checkpoints are written between steps: a run that is killed
between rollout and update samples the same answers again.

The reference model for KL is the model at the start of the run; it shares the frozen weights.
"""

import copy
from dataclasses import replace
from typing import TYPE_CHECKING

from llamarium.errors import TrainingError, counted, show_value
from llamarium.tokenizer.base import Tokenizer
from llamarium.train import finetune
from llamarium.train.config import GRPOConfig
from llamarium.train.data.marked import visible
from llamarium.train.data.prompts import PromptRows
from llamarium.train.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from llamarium.train.objectives.group_policy import GroupPolicy
from llamarium.train.rewards.functions import FORMS, Reward, rewards_of
from llamarium.train.rewards.rollouts import Rollouts
from llamarium.train.setup import Setup

if TYPE_CHECKING:
    from rich.text import Text


def prepare(config: GRPOConfig, process_group: ProcessGroup = SINGLE_PROCESS) -> Setup:
    """Load the base and the prompts, add adapters, and copy the reference if needed; errors as `finetune.prepare`."""
    if process_group.world_size > 1:
        raise TrainingError("grpo trains in one process, which also samples; start it without torchrun")
    if not config.reward:
        raise TrainingError(f"no reward; expected {FORMS}")
    setup = finetune.prepare(config, process_group, read_prompts)
    rows, validation = setup.train, setup.validation
    assert isinstance(rows, PromptRows) and (validation is None or isinstance(validation, PromptRows))
    rewards = rewards_of(config.reward, setup.tokenizer, setup.model.config.vocab_size)
    for part in filter(None, (rows, validation)):
        for reward in rewards.functions:
            _check_fields(part, reward)
    reference = None
    if config.beta:  # copy only trainable parameters; the reference shares all other memory
        shared = [*(p for p in setup.model.parameters() if not p.requires_grad), *setup.model.buffers()]
        reference = copy.deepcopy(setup.model, {id(tensor): tensor for tensor in shared}).requires_grad_(False).eval()
    rollouts = Rollouts(config, setup.model, setup.tokenizer, rows, validation, rewards, reference)
    return replace(setup, objective=GroupPolicy(config.epsilon, config.beta), rollouts=rollouts)


def read_prompts(config: GRPOConfig, tokenizer: Tokenizer) -> PromptRows:
    """Read the prompts; errors as `PromptRows.from_file`."""
    return PromptRows.from_file(
        config.data, tokenizer, config.context, config.max_tokens, truncate=config.truncate,
        chat=config.chat_format != "none", seed=config.seed, reading=config.reading,
    )  # fmt: skip


def first_row(config: GRPOConfig) -> "Text":
    """Format the first prompt with its control tokens; errors as `read_prompts`."""
    from rich.text import Text

    tokenizer = finetune.bare_tokenizer(config)
    ids = read_prompts(config, tokenizer).prompts[0].ids
    shown = Text(f"── {counted(len(ids), 'token')}, to be answered {counted(config.group_size, 'time')}\n", "bold")
    return shown.append(visible(tokenizer.decode(ids, skip_special_tokens=False)) + "\n", "dim")


def _check_fields(rows: PromptRows, reward: Reward) -> None:
    """Raise TrainingError if a row lacks the field that the reward requires."""
    lacking = [prompt for prompt in rows.prompts if reward.reads is not None and reward.reads not in prompt.row]
    if lacking:
        raise TrainingError(
            f"{lacking[0].place}: has the keys {show_value(list(lacking[0].row))}; the reward "
            f"{reward.name} reads {reward.reads!r}"
        )
