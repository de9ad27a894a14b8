"""Resume a run: compare a checkpoint with the current settings and data, and load it."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from llamarium.errors import TrainingError, escape, warn_caller
from llamarium.train.optim import restore_optimizers
from llamarium.train.setup import Setup
from llamarium.train.state.checkpoint import (
    checkpoint_step,
)
from llamarium.train.state.position import Position, entry
from llamarium.train.state.resume import load_resume


def restore_run(setup: Setup, folder: Path, optimizers: list[Optimizer], allow_changes: bool) -> Position:
    """Load a checkpoint, and return its position.

    Raises:
        TrainingError: If it is of another run, or has invalid values.
        CheckpointError: If the model cannot be read.
    """
    tensors, state = load_resume(folder)
    try:
        settings, about = entry(state, "settings", dict), entry(state, "about", dict)
        position, kind = Position.from_dict(entry(state, "position", dict)), entry(state, "kind", str)
        if position.step != checkpoint_step(folder):
            raise TrainingError(f"step is {position.step}; expected that of the folder's name")
    except TrainingError as error:
        raise TrainingError(f"{folder}/resume/state.json: {error}; the file was changed") from None
    if kind != type(setup.config).__name__:
        now = type(setup.config).__name__
        raise TrainingError(f"{folder}: is of a run of another kind ({escape(kind)}); this one is a {now}")
    changed = setup.config.differences(settings)
    if method := next((change for change in changed if change.startswith("method:")), None):
        raise TrainingError(f"{folder}: {method}, which learns other weights; begin a run in another folder")
    same_rows = state.get("data") == setup.train.fingerprint
    if not same_rows:
        changed += _data_differences(about, setup.train.about) or ([] if changed else ["the data is another"])
    if changed and not allow_changes:
        raise TrainingError(
            f"{folder}: the run was started with other settings ({'; '.join(changed)}); give those again, or allow the "
            "changes (--allow-changes)"
        )
    setup.restore(folder)
    if settings.get("optimizer") != setup.config.optimizer:
        warn_caller(f"the optimizer is now {setup.config.optimizer}, and begins anew")
    elif position.step > 0 and not tensors:  # as it is where no update was made
        warn_caller(f"{folder}: the optimizer remembers nothing, and begins anew")
    elif tensors:
        try:
            restore_optimizers(setup.model, optimizers, tensors, setup.process_group)
        except TrainingError as error:
            raise TrainingError(f"{folder}/resume/optimizer.safetensors: {error}") from None
    if not same_rows or settings.get("eval_rows") != setup.config.eval_rows:
        position.best_loss = math.inf  # of other rows, with which no loss from now on compares
    return position


def _data_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """List differences between a checkpoint's data and the current data: counts as "name: before -> now"."""
    before = {name: value for name, value in before.items() if type(value) is type(now.get(name))}
    if not before or before == now:
        return []
    counts = [name for name, value in now.items() if isinstance(value, int) and before.get(name) != value]
    return [f"{name}: {before.get(name, 0):,} -> {now[name]:,}" for name in counts] + [
        f"the {name} is {'the same' if before.get(name) == value else 'another'}"
        for name, value in now.items()
        if isinstance(value, str)
    ]
