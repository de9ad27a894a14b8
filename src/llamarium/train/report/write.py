"""Write a run's report: curves, samples over time, and the movement of embedding rows.

It is made from `metrics.jsonl` and the snapshots of the embedding table, so the run may be running, killed, or from
another machine. Values in these files are not trusted: numbers are checked, and text is escaped.
"""

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

from llamarium.errors import OutputError, TrainingError, counted, escape
from llamarium.hub.folders import is_adapter
from llamarium.io import atomic_file, unwritable
from llamarium.train.report import page
from llamarium.train.report.embeddings import embedding_paths
from llamarium.train.report.history import History, number_of
from llamarium.train.report.page import Series, duration, number
from llamarium.train.state.checkpoint import checkpoint_folder, checkpoint_steps

_MAX_SAMPLES = 12
_REWARD_CURVES = (
    ("Spread", "reward_spread", "Of rewards within a group, a standard deviation; where it is 0, nothing is learned."),
    ("KL", "kl", "How far the model has moved from the reference, nats per token."),
    ("Length", "length", "Tokens of an answer."),
    ("Entropy", "entropy", "Of the distributions that answers are sampled from, nats per token, as an estimate."),
    ("Difference", "largest_difference", "The largest of log P between the passes that sampled and that trained."),
)
_SKIPPED = {
    "not finite": "gradients were not finite",
    "no labels": "no token had a label",
    "no signal": "there was no learning signal: the gradient was zero",
}
_PORT = 8765  # of the page that the report links to


def write_report(run: Path) -> Path:
    """Write `report.html` into a run's folder and return its path.

    TrainingError if the folder has no run; OutputError if the report cannot be written.
    """
    history, name = History.read(run), f"Training run: {run.resolve().name}"
    done, steps = history.last("step", "step"), history.section("settings").get("steps", "?")
    ended = history.of("end")
    is_early = bool(ended) and bool(ended[-1].get("signal") or ended[-1].get("early"))
    how = "still running, or killed" if not ended else "ended early" if is_early else "finished"
    of = counted(steps, "step") if isinstance(steps, int) else f"{steps} steps"  # a value from a file may have any type
    sentence = f"{number(done)} of {of} on {history.start.get('device', '?')}; {how}."
    body = [
        f"<h1>{page.text(name)}</h1>",
        f'<p class="soft">{page.text(sentence)}</p>',
        page.facts(_facts(history)),
        *_alarms(history),
        "<h2>Curves</h2>",
        f'<div class="plots">{"".join(_curves(history))}</div>',
        *_skipped(history),
        "<h2>Samples over time</h2>",
        *(_groups(history) if history.of("group") else _samples(history)),
        "<h2>How embedding rows moved</h2>",
        *embedding_paths(history),
        "<h2>Look inside</h2>",
        *_look_inside(history),
        *_mixture(history),
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
    """Write a page that compares several named runs, and return its path.

    `notes` are introductory paragraphs in plain text; `columns` are the first columns of the table: heading to run name
    to text.
    """
    if not 1 <= len(runs) <= page.NUM_STYLES:
        raise TrainingError(f"{len(runs)} runs to compare; expected 1 to {page.NUM_STYLES}")
    histories = {name: History.read(run) for name, run in runs.items()}
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
        f'<div class="plots">{"".join(_compared(histories))}</div>',
        "<h2>What they write at the end</h2>",
        *samples,
        "<h2>Settings</h2>",
        *(page.details(name, _settings(h, "settings") + _settings(h, "model")) for name, h in histories.items()),
    ]
    return _write(out, page.page(title, body))


def is_report(path: Path) -> bool:
    """Return whether a file is a report of one or several runs."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(page.HEAD)) == page.HEAD.encode()


def _facts(history: History) -> Iterator[tuple[str, str]]:
    yield "training loss", number(history.last("step", "loss"))
    if rewards := history.curve("validation", "reward"):
        step, most = max(rewards, key=lambda point: point[1])
        yield f"best validation reward, step {step:,.0f}", number(most)
    elif (best := history.best()) is not None:
        yield f"best validation loss, step {best[0]:,.0f}", number(best[1])
    yield "parameters", number(number_of(history.start.get("parameters")))
    trainable = number_of(history.start.get("trainable"))
    if trainable != number_of(history.start.get("parameters")):
        yield "of them trained", number(trainable)
    yield "tokens seen", number(history.last("step", "num_tokens"))
    yield "tokens/s", number(history.tokens_per_s())
    if (mfu := history.last("step", "mfu")) is not None:
        yield "of the peak (MFU)", f"{mfu:.1%}"
    seconds = history.last("step", "seconds")
    yield "time in steps", "-" if seconds is None else duration(seconds)
    yield "KV cache, bytes/token", number(history.kv_bytes())


def _curves(history: History) -> Iterator[str]:
    losses = history.curve("step", "loss")
    series = [
        Series("training, each line of the log", losses, 0, faint=True),
        Series("training, smoothed", page.smoothed(losses) if len(losses) > 1 else (), 0),
        Series("validation", history.validations(), 1, dots=True),
    ]
    if rewards := history.curve("step", "reward"):
        series = [
            Series("of the sampled answers", rewards, 0),
            Series("validation, greedy", history.curve("validation", "reward"), 1, dots=True),
        ]
        yield page.figure("Reward", "reward", series, "The mean, as the function gave it.")
        if several := [*_parts(history)]:
            yield page.figure("Rewards by function", "reward", several, "The mean of each, before its weight.")
        for title, field, caption in _REWARD_CURVES:
            yield page.figure(title, title.lower(), [Series(title.lower(), history.curve("step", field))], caption)
    else:
        yield page.figure("Loss", "nats per token", series, "The mean of -log P of the next token; lower is better.")
    for title, unit, field, caption in (
        ("Learning rate", "learning rate", "learning_rate", "As the schedule set it."),
        ("Gradient norm", "norm", "grad_norm", "Of all gradients together, before clipping."),
        ("Speed", "tokens per second", "tokens_per_s", "Validations, samples and saves are not counted."),
    ):
        yield page.figure(title, unit, [Series(title.lower(), history.curve("step", field))], caption)


def _compared(histories: Mapping[str, History]) -> Sequence[str]:
    def figure(title: str, unit: str, kind: str, field: str, caption: str = "", *, smooth: bool = False) -> str:
        curves = (h.validations() if kind == "validation" else h.curve(kind, field) for h in histories.values())
        shown = zip(histories, map(page.smoothed, curves) if smooth else curves, strict=True)
        dots = kind == "validation"
        return page.figure(title, unit, [Series(n, c, i, dots=dots) for i, (n, c) in enumerate(shown)], caption)

    nats, smoothed = "nats per token", "Smoothed over a twentieth of the run."
    return (
        figure("Validation loss", nats, "validation", "loss", "Of held-out text; lower is better."),
        figure("Training loss", nats, "step", "loss", smoothed, smooth=True),
        figure("Gradient norm", "before clipping", "step", "grad_norm"),
        figure("Speed", "tokens per second", "step", "tokens_per_s"),
    )


def _samples(history: History) -> Iterator[str]:
    found = history.of("sample")
    shown = page.spread(found, _MAX_SAMPLES)
    if not found:
        yield '<p class="soft">None were taken.</p>'
    elif len(shown) < len(found):
        yield f'<p class="soft">{len(shown)} of {len(found)}.</p>'
    for event in shown:
        yield f"<h3>Step {number_of(event['step']):,.0f}</h3>{_sample(event)}"


def _parts(history: History) -> Iterator[Series]:
    """Yield a curve for each reward function, if there are several."""
    fields = dict.fromkeys(name for event in history.of("step") for name in event if name.startswith("reward/"))
    for style, field in enumerate(fields):
        yield Series(field.removeprefix("reward/"), history.curve("step", field), style % page.NUM_STYLES)


def _alarms(history: History) -> Iterator[str]:
    """Format the run's alarms with the steps at which they were raised and ended."""
    rows: list[list[str]] = []
    for event in history.events:
        kind, name, step = event["event"], str(event.get("alarm")), number_of(event["step"])
        if kind == "alarm":
            rows.append([name, number(step), "-", str(event.get("message", ""))])
        elif kind == "alarm_over":
            for row in [row for row in rows if row[0] == name][-1:]:
                row[2] = number(step)
    if rows:
        yield "<h2>Alarms</h2>"
        yield page.table("Each is raised once until it is over.", ("alarm", "step", "over at", "what"), rows)


def _skipped(history: History) -> Iterator[str]:
    """Format the number of skipped updates by reason."""
    reasons = Counter(str(event.get("reason", "not finite")) for event in history.of("skipped"))
    for reason, words in _SKIPPED.items():
        if reasons[reason]:
            updates = counted(reasons[reason], "update was", "updates were")
            yield f"<p>{page.text(f'{updates} skipped, as {words}.')}</p>"


def _groups(history: History) -> Iterator[str]:
    """Format groups of answers, sorted by advantage."""
    for event in page.spread(history.of("group"), _MAX_SAMPLES):
        rows = [cast("dict[str, Any]", answer) for answer in event.get("answers", ()) if isinstance(answer, dict)]
        rows.sort(key=lambda answer: -(number_of(answer.get("advantage")) or 0.0))
        parts = [cast("dict[str, Any]", p) if isinstance(p := a.get("parts"), dict) else {} for a in rows]
        names = [*dict.fromkeys(name for part in parts for name in part)]
        cells = [
            (
                number(number_of(a.get("reward"))),
                *(number(number_of(part.get(name))) for name in names),
                number(number_of(a.get("advantage"))),
                a.get("text", ""),
            )
            for a, part in zip(rows, parts, strict=True)
        ]
        yield f"<h3>Step {number_of(event['step']):,.0f}</h3>"
        yield page.table(str(event.get("prompt", "")), ("reward", *names, "advantage", "answer"), cells)


def _sample(event: Mapping[str, Any]) -> str:
    if "error" in event:
        return f"<p>{page.text(event['error'])}</p>"
    prompt = f'<span class="soft">{page.text(event.get("prompt", ""))}</span>'
    return f"<pre tabindex='0'>{prompt}{page.text(event.get('text', ''))}</pre>"


def _look_inside(history: History) -> Iterator[str]:
    """Describe how to open the run's checkpoints in the web page of `llamarium inspect`."""
    steps = checkpoint_steps(history.run)
    if not steps or is_adapter(checkpoint_folder(history.run, steps[-1])):
        yield '<p class="soft">Nothing to open: there is no checkpoint with a whole model in it.</p>'
        return
    link = f"http://127.0.0.1:{_PORT}/#stage=checkpoints&run={quote(history.run.resolve().name, safe='')}"
    command = f"llamarium inspect --checkpoints {shlex.quote(str(history.run))} --port {_PORT}"
    kept = counted(len(steps), "checkpoint is", "checkpoints are")
    yield (
        f"<p>Of this run {kept} on the disk. This command opens them in a browser: rows of the table moving, a "
        "head's pattern forming, the loss of a text of your own, and two of them side by side.</p>"
        f"<pre tabindex='0'>{page.text(command)}</pre>"
        f'<p>While it runs, <a href="{page.text(link)}">this link</a> opens the same view; it needs the key, which '
        "stands in the link that the command prints.</p>"
    )


def _mixture(history: History) -> Iterator[str]:
    """Format the sources of a mixture with weights, shares and passes."""
    found = history.section("data").get("sources")
    parts = cast("list[Any]", found if isinstance(found, list) else [])
    sources = [cast("dict[str, Any]", part) for part in parts if isinstance(part, dict)]
    if sources:
        columns = ("source", "weight", "share", "passes", "tokens")
        rows = ([part.get("source", ""), *(number(number_of(part.get(c))) for c in columns[1:])] for part in sources)
        yield "<h2>The mixture</h2>"
        yield page.table("Share of the draws, and passes over each source in an epoch.", columns, rows)


def _settings(history: History, section: str) -> str:
    rows = ((name, "-" if value is None else value) for name, value in history.section(section).items())
    return page.table(section, ("name", "value"), rows)


def _comparison(histories: Mapping[str, History], columns: Mapping[str, Mapping[str, str]]) -> str:
    def row(name: str, history: History) -> tuple[str, ...]:
        best, validations = history.best(), history.last("validation", "loss")
        return (
            name,
            *(values.get(name, "-") for values in columns.values()),
            number(validations),
            "-" if best is None else f"{number(best[1])} (step {best[0]:,.0f})",
            number(history.last("step", "loss")),
            number(number_of(history.start.get("parameters"))),
            number(history.kv_bytes()),
            number(history.tokens_per_s()),
        )

    heads = (
        "run", *columns, "validation loss", "best", "training loss", "parameters", "KV cache, bytes/token", "tokens/s",
    )  # fmt: skip
    return page.table(
        "Losses are nats per token; the cache is counted in bfloat16.", heads, (row(n, h) for n, h in histories.items())
    )


def _write(path: Path, content: str) -> Path:
    try:
        if path.suffix != ".html":
            raise OutputError(f"{escape(path)}: is no name of a page; expected one that ends in .html")
        if path.exists() and not is_report(path):
            raise OutputError(f"{escape(path)}: is there already, and is no report; choose another name, or remove it")
        with atomic_file(path) as file:
            file.write(content.encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise unwritable(path, error) from error
    return path
