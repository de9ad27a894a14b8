"""Draw the paths of embedding rows during training, in the two directions that show most."""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from llamarium.errors import LlamariumError, TrainingError
from llamarium.train.report import page
from llamarium.train.report.history import History
from llamarium.train.report.page import number
from llamarium.train.state.snapshots import read_snapshot

_MAX_MOMENTS = 40  # of the embedding rows' paths
_PLANE = 440  # width and height of the embeddings' drawing


def embedding_paths(history: History) -> Iterator[str]:
    """Yield the report's section about the rows, as HTML."""
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


def project(moments: Sequence[Tensor]) -> tuple[Tensor, float]:
    """Project rows at S moments, (R, D) each, float32, onto the first two principal components of the last.

    Returns:
        The places, (S, R, 2), and the share of the last moment's variance that they show.

    Raises:
        TrainingError: If shapes differ, or values are not finite.
    """
    last_RD = moments[-1]
    if any(rows.shape != last_RD.shape for rows in moments) or min(last_RD.shape) < 2:
        raise TrainingError(f"snapshots of {sorted({tuple(m.shape) for m in moments})}; expected one shape, (2, 2) up")
    all_SRD = torch.stack(list(moments))
    if not all_SRD.isfinite().all():
        raise TrainingError("a snapshot holds values that are not finite")
    mean_D = last_RD.mean(dim=0)
    _, scales, directions = torch.linalg.svd(last_RD - mean_D, full_matrices=False)
    plane_2D = directions[:2]
    largest = plane_2D.abs().argmax(dim=1, keepdim=True)
    plane_2D = (
        plane_2D * plane_2D.gather(1, largest).sign()
    )  # a component's sign is arbitrary; so it is the same always
    variances = scales.square()
    return (all_SRD - mean_D) @ plane_2D.T, float(variances[:2].sum() / variances.sum().clamp(min=1e-30))


def _paths(paths_SR2: Tensor, names: Sequence[str]) -> str:
    low, high = paths_SR2.amin(dim=(0, 1)), paths_SR2.amax(dim=(0, 1))
    scaled = (paths_SR2 - low) / (high - low).clamp(min=1e-30)
    places = (scaled * torch.tensor([_PLANE - 60.0, _PLANE - 30.0]) + torch.tensor([15.0, 15.0])).tolist()
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


def _moved(first_RD: Tensor, last_RD: Tensor, names: Sequence[str]) -> str:
    distances: list[float] = (last_RD - first_RD).norm(dim=1).tolist()
    before: list[float]
    after: list[float]
    before, after = first_RD.norm(dim=1).tolist(), last_RD.norm(dim=1).tolist()
    order = sorted(range(len(names)), key=distances.__getitem__, reverse=True)
    shown = ((f'"{names[r]}"', number(distances[r]), number(before[r]), number(after[r])) for r in order)
    return page.table("Euclidean, farthest first", ("token", "distance", "length before", "length after"), shown)
