"""Movement of embedding rows during training, projected to two principal components."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llamarium.checkpoints.export import read_array
from llamarium.checkpoints.open import open_checkpoint
from llamarium.config import EMBEDDING
from llamarium.errors import InputError, TrainingError, counted, escape
from llamarium.quant.packing import to_float32
from llamarium.train.state.checkpoint import checkpoint_folder, checkpoint_steps

_Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class RowPaths:
    """Rows of the embedding table during a run, in one projection.

    Attributes:
        steps: Steps of the S checkpoints, the oldest first.
        ids: Token ids of the R rows.
        places_SR2: Coordinates on the first two principal components of the last checkpoint's rows.
        share: Share of the last checkpoint's variance that they explain.
    """

    steps: tuple[int, ...]
    ids: tuple[int, ...]
    places_SR2: _Floats
    share: float


def row_paths(run: Path, ids: Sequence[int], *, steps: Sequence[int] | None = None) -> RowPaths:
    """Project at least two rows of the embedding table at each checkpoint of a run (`steps` None is all).

    InputError for ids outside the table, or fewer than two; LlamariumError for a missing or malformed checkpoint.
    """
    chosen_steps = tuple(checkpoint_steps(run) if steps is None else steps)
    if not chosen_steps:
        raise TrainingError(f"{escape(run)}: holds no checkpoint; expected a run's folder, with step-00000500 or so")
    if len(set(ids)) < 2:
        raise InputError(f"{counted(len(set(ids)), 'row')} chosen; expected at least two")
    moments = [_rows(checkpoint_folder(run, step), ids) for step in chosen_steps]
    places_SR2, share = project(moments)
    return RowPaths(chosen_steps, tuple(ids), places_SR2, share)


def _rows(folder: Path, ids: Sequence[int]) -> _Floats:
    """Return rows of a checkpoint's embedding table, (R, D) float32."""
    checkpoint = open_checkpoint(folder)
    vocab_size = checkpoint.config.vocab_size
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise InputError(f"rows {min(ids)} to {max(ids)} requested; the table has 0 to {vocab_size - 1}")
    return to_float32(read_array(checkpoint, EMBEDDING)[list(ids)])


def project(moments: Sequence[_Floats]) -> tuple[_Floats, float]:
    """Project S snapshots of rows, (R, D) each, onto the first two principal components of the last.

    Returns the coordinates, (S, R, 2), and the share of the last snapshot's variance that they explain. TrainingError
    for values that are not finite.
    """
    last_RD = moments[-1]
    if any(rows.shape != last_RD.shape for rows in moments) or min(last_RD.shape) < 2:
        raise TrainingError(f"snapshots of {sorted({m.shape for m in moments})}; expected one shape, (2, 2) up")
    all_SRD = np.stack(moments)
    if not np.isfinite(all_SRD).all():
        raise TrainingError("a snapshot holds values that are not finite")
    mean_D = last_RD.mean(axis=0)
    _, scales, directions = np.linalg.svd(last_RD - mean_D, full_matrices=False)
    plane_2D = directions[:2]
    largest = np.abs(plane_2D).argmax(axis=1, keepdims=True)
    plane_2D = plane_2D * np.sign(np.take_along_axis(plane_2D, largest, axis=1))  # a component's sign is arbitrary
    variances = np.square(scales)
    return (all_SRD - mean_D) @ plane_2D.T, float(variances[:2].sum() / max(variances.sum(), 1e-30))
