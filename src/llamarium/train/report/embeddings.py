"""Movement of embedding rows during training, projected to two principal components, as a plot and a table."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from llamarium.checkpoints.export import read_array
from llamarium.checkpoints.open import open_checkpoint
from llamarium.config import EMBEDDING
from llamarium.errors import InputError, LlamariumError, TrainingError, counted, escape
from llamarium.quant.packing import to_float32
from llamarium.train.report import page
from llamarium.train.report.page import number
from llamarium.train.state.checkpoint import checkpoint_folder, checkpoint_steps

if TYPE_CHECKING:
    from llamarium.train.report.history import History

_MAX_MOMENTS = 40  # snapshots per path
_PLANE = 440  # width and height of the plot

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


def embedding_paths(history: "History") -> Iterator[str]:
    """Yield the report's section about embedding rows, as HTML."""
    from llamarium.train.state.snapshots import read_snapshot  # imports torch

    steps = page.spread(sorted({int(event["step"]) for event in history.of("embeddings")}), _MAX_MOMENTS)
    if len(steps) < 2:
        yield '<p class="soft">They were not followed: the table is frozen, or too few snapshots were taken.</p>'
        return
    try:
        moments = [read_snapshot(history.run, step) for step in steps]
        paths_SR2, share = project(moments)
    except LlamariumError as error:
        yield f"<p>They cannot be shown: {page.text(error)}</p>"
        return
    tokens = history.start.get("tokens")
    texts = [str(token) for token in cast(list[Any], tokens)] if isinstance(tokens, list) else []
    names = (texts + [f"row {i}" for i in range(len(texts), paths_SR2.shape[1])])[: paths_SR2.shape[1]]
    yield (
        f"<p>{len(names)} rows of the embedding table at {len(steps)} moments, from step {steps[0]:,} to step "
        f"{steps[-1]:,}, seen from the side that shows most of where they are at the end: its first two principal "
        f"components, which hold {share:.0%} of the variance. Each line is a row's path, its text stands at the end; "
        "texts that would cover others are left out.</p>"
    )
    caption = "Rows whose tokens are used alike come to lie near each other."
    yield f'<figure style="max-width: 46rem">{_paths(paths_SR2, names)}<figcaption>{caption}</figcaption>'
    yield page.details("How far each row moved", _moved(moments[0], moments[-1], names)) + "</figure>"


def _paths(paths_SR2: _Floats, names: Sequence[str]) -> str:
    low, high = paths_SR2.min(axis=(0, 1)), paths_SR2.max(axis=(0, 1))
    scaled = (paths_SR2 - low) / np.maximum(high - low, 1e-30)
    places = (scaled * (_PLANE - 60.0, _PLANE - 30.0) + 15.0).tolist()
    parts: list[str] = []
    taken: list[tuple[float, float, float]] = []
    for row, name in enumerate(names):
        path = [moment[row] for moment in places]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in path)
        parts.append(f'<polyline class="curve faint k0" points="{line}"><title>{page.text(name)}</title></polyline>')
        x, y = path[-1]
        parts.append(
            f'<circle class="dot k0" cx="{x:.1f}" cy="{y:.1f}" r="1.5"><title>{page.text(name)}</title></circle>'
        )
        label = "␣" if name == " " else name[:16]
        width = 6.0 * len(label)
        if all(abs(y - v) > 9 or x + width < u or x > u + w for u, v, w in taken):
            taken.append((x, y, width))
            parts.append(f'<text class="token" x="{x + 3:.1f}" y="{y + 3:.1f}">{page.text(label)}</text>')
    described = f"the paths of {len(names)} rows from the first moment to the last, each ending at its token's text"
    return page.svg("Embedding rows", described, _PLANE, _PLANE, "".join(parts))


def _moved(first_RD: _Floats, last_RD: _Floats, names: Sequence[str]) -> str:
    lengths = (np.linalg.norm(rows_RD, axis=1) for rows_RD in (last_RD - first_RD, first_RD, last_RD))
    rows = sorted(zip(*(length.tolist() for length in lengths), names, strict=True), key=lambda row: -row[0])
    shown = ((f'"{name}"', *map(number, values)) for *values, name in rows)
    return page.table("Euclidean, farthest first", ("token", "distance", "length before", "length after"), shown)
