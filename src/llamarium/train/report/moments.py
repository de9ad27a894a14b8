"""Positions of embedding rows at each of a run's checkpoints."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from llamarium.checkpoints.decode import read
from llamarium.checkpoints.open import open_checkpoint
from llamarium.config import EMBEDDING
from llamarium.errors import InputError, TrainingError, escape
from llamarium.train.report.embeddings import project
from llamarium.train.state.checkpoint import checkpoint_folder, checkpoint_steps


@dataclass(frozen=True, slots=True, eq=False)
class RowPaths:
    """Rows of the embedding table over a run, in one projection.

    Attributes:
        steps: The checkpoints, S of them, the oldest first.
        ids: The rows, R of them.
        places_SR2: Their places on the first two principal components of the last checkpoint's rows.
        share: Of the last one's variance that these show.
    """

    steps: tuple[int, ...]
    ids: tuple[int, ...]
    places_SR2: Tensor
    share: float


def row_paths(run: Path, ids: Sequence[int], *, steps: Sequence[int] | None = None) -> RowPaths:
    """Follow rows of the embedding table through a run's checkpoints; only those rows are read.

    Args:
        run: The run's folder.
        ids: At least two tokens.
        steps: The checkpoints; None is all.

    Raises:
        InputError: For ids outside the table, or too few.
        LlamariumError: If there is no such checkpoint, or it cannot be read.
    """
    wanted = tuple(checkpoint_steps(run) if steps is None else steps)
    if not wanted:
        raise TrainingError(f"{escape(run)}: holds no checkpoint; expected a run's folder, with step-00000500 or so")
    if len(set(ids)) < 2:
        raise InputError(f"there are {len(set(ids))} rows to look at; expected at least two")
    moments = [_rows(checkpoint_folder(run, step), ids) for step in wanted]
    places_SR2, share = project(moments)
    return RowPaths(wanted, tuple(ids), places_SR2, share)


@torch.no_grad()
def _rows(folder: Path, ids: Sequence[int]) -> Tensor:
    """Return rows of a checkpoint's table, (R, D) float32."""
    checkpoint = open_checkpoint(folder)
    vocab_size = checkpoint.config.vocab_size
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise InputError(f"rows {min(ids)} to {max(ids)} are asked for; the table has 0 to {vocab_size - 1}")
    return read(checkpoint, EMBEDDING)[list(ids)].float()
