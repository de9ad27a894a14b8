"""Log a run to TensorBoard or trackio.

Both consume the run's events, like `metrics.jsonl` and the terminal view, and log metrics by step, settings and
samples.

A resumed run continues the same curves. TensorBoard hides points after the checkpoint; trackio cannot hide them and
shows them together with the newer ones.
"""

import contextlib
import json
import sys
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from llamarium.errors import OutputError, TrainingError, escape
from llamarium.extras import optional

_STEP_NUMBERS = ("loss", "learning_rate", "grad_norm", "tokens_per_s", "mfu")

Event = Mapping[str, Any]
Watcher = Callable[[Event], None]


@contextmanager
def trackers(names: Iterable[str], run: Path) -> Generator[list[Watcher]]:
    """Yield a watcher for each distinct name in `TRACKERS`, and close them at the end.

    TensorBoard's files are in the folder `tensorboard` of the run; in trackio the run has the folder's name.
    TrainingError for an unknown name; OptionError if a package is missing.
    """
    chosen = dict.fromkeys(names)
    if unknown := [name for name in chosen if name not in TRACKERS]:
        raise TrainingError(f"there is no tracker {escape(unknown[0])}; there are: {', '.join(TRACKERS)}")
    with ExitStack() as stack:
        yield [stack.enter_context(TRACKERS[name](run)) for name in chosen]


@contextmanager
def _tensorboard(run: Path) -> Generator[Watcher]:
    """Write TensorBoard event files; view them with `tensorboard --logdir RUN`."""
    make: Any = optional("torch.utils.tensorboard", "tensorboard", "--report-to", "tensorboard").SummaryWriter
    folder, opened = run / "tensorboard", list[Any]()

    def close() -> None:
        with contextlib.suppress(OSError):  # a full disk has been reported already
            while opened:
                opened.pop().close()

    def write(event: Event) -> None:
        step = event["step"]
        if event["event"] in ("start", "resume"):
            close()
            first = step + 1 if event["event"] == "resume" else 0  # older files are hidden from this step on
            opened.append(make(str(folder), purge_step=first))
            opened[-1].add_text("settings", _block(json.dumps(event["settings"], indent=2)), step)
        for tag, value in numbers_of(event).items():
            opened[-1].add_scalar(tag, value, step)
        if event["event"] == "sample":
            opened[-1].add_text("sample", _sample(event), step)
        opened[-1].flush()  # so that a killed run loses nothing

    def watch(event: Event) -> None:
        try:
            write(event)
        except OSError as error:
            raise OutputError(f"{escape(folder)}: cannot be written: {escape(error.strerror or error)}") from None

    try:
        yield watch
    finally:
        close()


@contextmanager
def _trackio(run: Path) -> Generator[Watcher]:
    """Log to the trackio project "llamarium", locally unless trackio's settings name a Space or server."""
    trackio, opened, name = optional("trackio", "trackio", "--report-to"), list[Any](), run.resolve().name

    def close() -> None:
        with redirect_stdout(sys.stderr):  # stdout is for results
            while opened:
                opened.pop().finish()

    def watch(event: Event) -> None:
        if event["event"] in ("start", "resume"):
            close()
            resume, settings = "allow" if event["event"] == "resume" else "never", dict(event["settings"])
            with redirect_stdout(sys.stderr):
                opened.append(trackio.init(project="llamarium", name=name, config=settings, resume=resume))
        if numbers := numbers_of(event):
            opened[-1].log(numbers, step=event["step"])
        if event["event"] == "sample":
            opened[-1].log({"sample": trackio.Markdown(_sample(event))}, step=event["step"])

    try:
        yield watch
    finally:
        close()


TRACKERS: Mapping[str, Callable[[Path], AbstractContextManager[Watcher]]] = {
    "tensorboard": _tensorboard, "trackio": _trackio,
}  # fmt: skip


def numbers_of(event: Event) -> dict[str, float]:
    """Return an event's metrics by their names in trackers, without those that are None (e.g. MFU)."""
    if event["event"] == "step":
        numbers = {f"train/{name}": event[name] for name in _STEP_NUMBERS}
    elif event["event"] == "validation":
        numbers = {"validation/loss": event["loss"]}
    else:
        numbers = {}
    return {name: value for name, value in numbers.items() if value is not None}


def _sample(event: Event) -> str:
    answer = event["text"] if "text" in event else f"not made: {event['error']}"
    return f"prompt\n\n{_block(event['prompt'])}\n\ntext\n\n{_block(answer)}"


def _block(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
