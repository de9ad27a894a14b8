"""Log a run to TensorBoard or trackio, as it happens.

Both are watchers: they take the run's events, like `metrics.jsonl` and the terminal's view, and log numbers by step.

    event         logged
    start         the settings, as text (TensorBoard) or as the run's config (trackio)
    step          train/loss, train/learning_rate, train/grad_norm, train/tokens_per_s, train/mfu
    validation    validation/loss
    sample        sample, as text

A resumed run continues the same curves. Points after its checkpoint are hidden in TensorBoard; trackio, which cannot
hide them, keeps them beside the newer ones.
"""

import contextlib
import json
import sys
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from llamarium.errors import OutputError, TrainingError, escape
from llamarium.extras import optional

_STEP_NUMBERS = ("loss", "learning_rate", "grad_norm", "tokens_per_s", "mfu")

Event = Mapping[str, Any]


@contextmanager
def trackers(names: Iterable[str], run: Path) -> Generator[list[Callable[[Event], None]]]:
    """Yield a watcher of each name, and close them at the end.

    Args:
        names: Of `TRACKERS`; repeated ones count once.
        run: The run's folder. TensorBoard's files go into its `tensorboard`; for trackio its name is the run's.

    Raises:
        TrainingError: If there is no such tracker.
        OptionError: If its package is not installed.
    """
    with ExitStack() as stack:
        opened: list[Callable[[Event], None]] = []
        for name in dict.fromkeys(names):
            if name not in TRACKERS:
                raise TrainingError(f"there is no tracker {escape(name)}; there are: {', '.join(TRACKERS)}")
            tracker = TRACKERS[name](run)
            stack.callback(tracker.close)
            opened.append(tracker)
        yield opened


class TensorBoard:
    """Writes TensorBoard's event files into a run's folder; `tensorboard --logdir RUN` shows them.

    Raises:
        OptionError: If the package is not installed.
    """

    def __init__(self, run: Path) -> None:
        self.folder = run / "tensorboard"
        self._make: Any = optional("torch.utils.tensorboard", "tensorboard", "--report-to", "tensorboard").SummaryWriter
        self._writer: Any = None

    def __call__(self, event: Event) -> None:
        """Write what an event holds.

        Raises:
            OutputError: If it cannot be written.
        """
        try:
            self._write(event)
        except OSError as error:
            raise OutputError(f"{escape(self.folder)}: cannot be written: {escape(error.strerror or error)}") from None

    def _write(self, event: Event) -> None:
        step = event["step"]
        if event["event"] in ("start", "resume"):
            self.close()
            first = step + 1 if event["event"] == "resume" else 0  # the first step that older files may not show
            self._writer = self._make(str(self.folder), purge_step=first)
            settings = json.dumps(event["settings"], indent=2)
            self._writer.add_text("settings", _block(settings), step)
        for tag, value in numbers_of(event).items():
            self._writer.add_scalar(tag, value, step)
        if event["event"] == "sample":
            self._writer.add_text("sample", _sample(event), step)
        self._writer.flush()  # so that a run which is killed leaves what it has told

    def close(self) -> None:
        """Write out what is left."""
        if self._writer is not None:
            with contextlib.suppress(OSError):  # a full disk has been told
                self._writer.close()
            self._writer = None


class Trackio:
    """Logs a run into trackio's project "llamarium"; `trackio show` shows it.

    Unless its own settings name a Space or server, everything stays on this machine.

    Raises:
        OptionError: If the package is not installed.
    """

    def __init__(self, run: Path) -> None:
        self.name = run.resolve().name
        self._trackio: Any = optional("trackio", "trackio", "--report-to")
        self._run: Any = None

    def __call__(self, event: Event) -> None:
        """Log an event."""
        if event["event"] in ("start", "resume"):
            self.close()
            resume = "allow" if event["event"] == "resume" else "never"
            with redirect_stdout(sys.stderr):  # it greets, and stdout is for results
                self._run = self._trackio.init(
                    project="llamarium", name=self.name, config=dict(event["settings"]), resume=resume
                )
        if numbers := numbers_of(event):
            self._run.log(numbers, step=event["step"])
        if event["event"] == "sample":
            self._run.log({"sample": self._trackio.Markdown(_sample(event))}, step=event["step"])

    def close(self) -> None:
        """Send what is left."""
        if self._run is not None:
            with redirect_stdout(sys.stderr):
                self._run.finish()
            self._run = None


TRACKERS: Mapping[str, Callable[[Path], TensorBoard | Trackio]] = {"tensorboard": TensorBoard, "trackio": Trackio}


def numbers_of(event: Event) -> dict[str, float]:
    """Return an event's numbers by their names in trackers, without those that are None (MFU, say)."""
    if event["event"] == "step":
        found = {f"train/{name}": event[name] for name in _STEP_NUMBERS}
    elif event["event"] == "validation":
        found = {"validation/loss": event["loss"]}
    else:
        found = {}
    return {name: value for name, value in found.items() if value is not None}


def _sample(event: Event) -> str:
    """Return a sample as Markdown, in code blocks."""
    answer = event["text"] if "text" in event else f"not made: {event['error']}"
    return f"prompt\n\n{_block(event['prompt'])}\n\ntext\n\n{_block(answer)}"


def _block(text: str) -> str:
    """Return a text as a code block."""
    return "\n".join(f"    {line}" for line in text.splitlines())
