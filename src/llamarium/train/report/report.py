"""What a run did, on one page: its curves, its samples over time, and how the embedding rows moved.

Everything comes from `metrics.jsonl` and the snapshots of the embedding table, so a report can be written of a run that
still runs, that was killed, or that another machine has made. Nothing in those files is trusted: numbers must be
numbers, and texts are escaped.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from llamarium.config import ModelConfig
from llamarium.errors import LlamariumError, OutputError, TrainingError, escape
from llamarium.inspect.tables import duration
from llamarium.io import atomic_file, unwritable
from llamarium.model.cost import kv_bytes_per_token
from llamarium.train.report import page
from llamarium.train.report.journal import NAME, read_journal
from llamarium.train.report.page import Point, Series, number
from llamarium.train.state.snapshots import read_snapshot

_MAX_SAMPLES = 12
_MAX_MOMENTS = 40  # of the embedding rows' paths
_PLANE = 440  # width and height of the embeddings' drawing


@dataclass(frozen=True, slots=True)
class History:
    """A run as its journal tells it.

    Attributes:
        run: Its folder.
        events: All of them.
        start: The newest that began or resumed it: settings, shape, parameters.
    """

    run: Path
    events: Sequence[Mapping[str, Any]]
    start: Mapping[str, Any]

    @classmethod
    def read(cls, run: Path) -> "History":
        """Read a run's journal.

        Raises:
            TrainingError: If there is none, or it is malformed.
        """
        events = list(read_journal(run / NAME))
        begun = [event for event in events if event["event"] in ("start", "resume")]
        if not begun:
            raise TrainingError(f"{escape(run)}: has no {NAME} that tells how a run began; expected a run's folder")
        return cls(run, events, begun[-1])

    def of(self, kind: str) -> list[Mapping[str, Any]]:
        """Return the events of a kind whose step is a number."""
        return [event for event in self.events if event["event"] == kind and _number(event["step"]) is not None]

    def curve(self, kind: str, field: str) -> list[Point]:
        """Return a field of a kind of event over the steps; what is no number is left out."""
        pairs = ((float(event["step"]), _number(event.get(field))) for event in self.of(kind))
        return sorted((x, y) for x, y in pairs if y is not None)

    def last(self, kind: str, field: str) -> float | None:
        """Return the last value of such a curve."""
        points = self.curve(kind, field)
        return points[-1][1] if points else None

    def best(self) -> Point | None:
        """Return the step and the value of the lowest validation loss."""
        return min(self.curve("validation", "loss"), key=lambda point: point[1], default=None)

    def tokens_per_s(self) -> float | None:
        """Return the median speed; the first line of several is left out, as it holds the warming up."""
        speeds = [y for _, y in self.curve("step", "tokens_per_s")]
        return statistics.median(speeds[1:] or speeds) if speeds else None

    def section(self, name: str) -> dict[str, Any]:
        """Return an object of the starting event, such as its settings."""
        found = self.start.get(name)
        return cast(dict[str, Any], found) if isinstance(found, dict) else {}

    def kv_bytes(self) -> int | None:
        """Return the bytes of KV cache that a token takes in bfloat16, or None where the shape is not told."""
        try:
            return kv_bytes_per_token(ModelConfig.from_hf(self.section("model"), f"{self.run / NAME}"))
        except LlamariumError:
            return None


def write_report(run: Path) -> Path:
    """Write `report.html` into a run's folder and return its path.

    Raises:
        TrainingError: If the folder holds no run, or its journal is malformed.
        OutputError: If the page cannot be written.
    """
    history = History.read(run)
    name = f"Training run: {run.resolve().name}"
    body = [
        f"<h1>{page.text(name)}</h1>",
        f'<p class="soft">{page.text(_sentence(history))}</p>',
        page.facts(_facts(history)),
        "<h2>Curves</h2>",
        f'<div class="plots">{"".join(_curves(history))}</div>',
        "<h2>Samples over time</h2>",
        *_samples(history),
        "<h2>How embedding rows moved</h2>",
        *_embeddings(history),
        "<h2>Settings and shape</h2>",
        page.details("Settings", _settings(history, "settings")),
        page.details("The model's shape", _settings(history, "model")),
    ]
    return _write(run / "report.html", page.page(name, body))


def compare(
    runs: Mapping[str, Path],
    out: Path,
    title: str,
    *,
    notes: Sequence[str] = (),
    columns: Mapping[str, Mapping[str, str]] | None = None,
) -> Path:
    """Write a page with several runs on one plot, and return its path.

    Args:
        runs: Their folders by name.
        out: The page's path.
        title: Its heading.
        notes: Paragraphs of plain text that say how to read it.
        columns: More columns of the table: by heading, then by the run's name.

    Raises:
        TrainingError: If there are no runs or more than a plot can tell apart, or a folder holds none.
        OutputError: If the page cannot be written.
    """
    if not 1 <= len(runs) <= page.NUM_STYLES:
        raise TrainingError(f"{len(runs)} runs to compare; expected 1 to {page.NUM_STYLES}")
    histories = {name: History.read(run) for name, run in runs.items()}
    names = {name: style for style, name in enumerate(histories)}
    training = [Series(n, page.smoothed(h.curve("step", "loss")), names[n]) for n, h in histories.items()]
    validation = [Series(n, h.curve("validation", "loss"), names[n], dots=True) for n, h in histories.items()]
    speed = [Series(n, h.curve("step", "tokens_per_s"), names[n]) for n, h in histories.items()]
    norms = [Series(n, h.curve("step", "grad_norm"), names[n]) for n, h in histories.items()]
    plots = (
        page.figure("Validation loss", "nats per token", validation, "Of held-out text; lower is better."),
        page.figure("Training loss", "nats per token", training, "Smoothed over a twentieth of the run."),
        page.figure("Gradient norm", "before clipping", norms),
        page.figure("Speed", "tokens per second", speed),
    )
    samples = (
        f"<h3>{page.text(name)}</h3>{_sample(history.of('sample')[-1])}"
        for name, history in histories.items()
        if history.of("sample")
    )
    body = [
        f"<h1>{page.text(title)}</h1>",
        *(f"<p>{page.text(note)}</p>" for note in notes),
        "<h2>The runs</h2>",
        _comparison(histories, columns or {}),
        "<h2>Curves</h2>",
        f'<div class="plots">{"".join(plots)}</div>',
        "<h2>What they write at the end</h2>",
        *samples,
        "<h2>Settings</h2>",
        *(page.details(name, _settings(h, "settings") + _settings(h, "model")) for name, h in histories.items()),
    ]
    return _write(out, page.page(title, body))


def _check_page(path: Path) -> None:
    """Check that a page may be written.

    Raises:
        OSError: If what is there cannot be read.
        OutputError: If its name is no page's, or something else than a report is there.
    """
    if path.suffix != ".html":
        raise OutputError(f"{escape(path)}: is no name of a page; expected one that ends in .html")
    if path.exists() and not _is_report(path):
        raise OutputError(f"{escape(path)}: is there already, and is no report; choose another name, or remove it")


def _is_report(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(page.HEAD)) == page.HEAD.encode()


# --- sections ---------------------------------------------------------------------------------------------------------


def _sentence(history: History) -> str:
    done, steps = history.last("step", "step"), history.section("settings").get("steps", "?")
    ended = history.of("end")
    how = "still running, or killed" if not ended else "ended early" if ended[-1].get("signal") else "finished"
    return f"{number(done)} of {steps} steps on {history.start.get('device', '?')}; {how}."


def _facts(history: History) -> Iterator[tuple[str, str]]:
    yield "training loss", number(history.last("step", "loss"))
    if (best := history.best()) is not None:
        yield f"best validation loss, step {best[0]:,.0f}", number(best[1])
    yield "parameters", number(_number(history.start.get("parameters")))
    trainable = _number(history.start.get("trainable"))
    if trainable != _number(history.start.get("parameters")):
        yield "of them trained", number(trainable)
    yield "tokens seen", number(history.last("step", "num_tokens"))
    yield "tokens/s", number(history.tokens_per_s())
    if (mfu := history.last("step", "mfu")) is not None:
        yield "of the peak (MFU)", f"{mfu:.1%}"
    yield "time in steps", _time(history.last("step", "seconds"))
    yield "KV cache, bytes/token", number(history.kv_bytes())


def _curves(history: History) -> Iterator[str]:
    losses = history.curve("step", "loss")
    series = [
        Series("training, each line of the log", losses, 0, faint=True),
        Series("training, smoothed", page.smoothed(losses) if len(losses) > 1 else (), 0),
        Series("validation", history.curve("validation", "loss"), 1, dots=True),
    ]
    yield page.figure("Loss", "nats per token", series, "The mean of -log P of the next token; lower is better.")
    for title, unit, field, caption in (
        ("Learning rate", "learning rate", "learning_rate", "As the schedule set it."),
        ("Gradient norm", "norm", "grad_norm", "Of all gradients together, before clipping."),
        ("Speed", "tokens per second", "tokens_per_s", "Validations, samples and saves are not counted."),
    ):
        yield page.figure(title, unit, [Series(title.lower(), history.curve("step", field))], caption)
    if skipped := history.of("skipped"):
        yield f"<p>{page.text(f'{len(skipped)} updates were skipped, as gradients were not finite.')}</p>"


def _samples(history: History) -> Iterator[str]:
    found = history.of("sample")
    shown = page.spread(found, _MAX_SAMPLES)
    if not found:
        yield '<p class="soft">None were taken.</p>'
    elif len(shown) < len(found):
        yield f'<p class="soft">{len(shown)} of {len(found)}.</p>'
    for event in shown:
        yield f"<h3>Step {_number(event['step']):,.0f}</h3>{_sample(event)}"


def _sample(event: Mapping[str, Any]) -> str:
    """Show a sample, its prompt in a softer colour."""
    if "error" in event:
        return f"<p>{page.text(event['error'])}</p>"
    prompt = f'<span class="soft">{page.text(event.get("prompt", ""))}</span>'
    return f"<pre tabindex='0'>{prompt}{page.text(event.get('text', ''))}</pre>"


def _settings(history: History, section: str) -> str:
    rows = ((name, "-" if value is None else value) for name, value in history.section(section).items())
    return page.table(section, ("name", "value"), rows)


def _comparison(histories: Mapping[str, History], columns: Mapping[str, Mapping[str, str]]) -> str:
    def row(name: str, history: History) -> tuple[str, ...]:
        best, validations = history.best(), history.last("validation", "loss")
        return (
            name,
            number(validations),
            "-" if best is None else f"{number(best[1])} (step {best[0]:,.0f})",
            number(history.last("step", "loss")),
            number(_number(history.start.get("parameters"))),
            number(history.kv_bytes()),
            number(history.tokens_per_s()),
            *(values.get(name, "-") for values in columns.values()),
        )

    heads = (
        "run", "validation loss", "best", "training loss", "parameters", "KV cache, bytes/token", "tokens/s", *columns,
    )  # fmt: skip
    return page.table(
        "Losses are nats per token; the cache is counted in bfloat16.", heads, (row(n, h) for n, h in histories.items())
    )


# --- embedding rows ---------------------------------------------------------------------------------------------------


def _embeddings(history: History) -> Iterator[str]:
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
    """Project rows at several moments onto the first two principal components of the last.

    Args:
        moments: (R, D) each, float32.

    Returns:
        The places, (S, R, 2) for S moments, and the share of the last moment's variance that they show.

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


# --- helpers ----------------------------------------------------------------------------------------------------------


def _number(value: object) -> float | None:
    """Return a number from a file as a float; None for anything else, or a number beyond use."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not abs(value) < 1e100:  # NaN, too
        return None
    return float(value) if abs(value) > 1e-100 else 0.0


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else duration(seconds)


def _write(path: Path, content: str) -> Path:
    """Write a page; in the place of another report, but of nothing else."""
    try:
        _check_page(path)
        with atomic_file(path) as file:
            file.write(content.encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise unwritable(path, error) from error
    return path
