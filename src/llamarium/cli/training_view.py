"""Progress display of a training run: a live view on a terminal, else one line per event."""

import math
import sys
import time
from collections import deque
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamarium.cli.output import draws, duration, note, note_paragraph, printable, quote, table, warn
from llamarium.errors import counted, escape

if TYPE_CHECKING:
    from rich.console import RenderableType

    from llamarium.train.journal import Emit, Event

_WIDTH = 60  # width of the curve in characters
_LONGEST = 600  # maximum characters of a sample
_REDRAW_S = 0.2  # minimum seconds between redraws
_WITHOUT_TIMING = {"all": "", "as the first": ", as the first run", "compiled": ", not timed as the step is compiled"}
_BLOCKS = "▁▂▃▄▅▆▇█"


@contextmanager
def view(num_steps: int, *, quiet: bool) -> "Generator[Emit]":
    """Yield a function that shows events on stderr, or nothing if `quiet`."""
    if quiet:
        yield lambda event: None
    elif not draws(sys.stderr):
        yield lambda event: _tell(event, num_steps)
    else:
        from rich.console import Console
        from rich.live import Live

        console = Console(file=sys.stderr, markup=False, emoji=False, highlight=False)
        board, live, drawn_at = Board(num_steps), Live(console=console, auto_refresh=False), 0.0

        def show(event: "Event") -> None:
            nonlocal drawn_at
            board.take(event)
            if event["event"] in ("start", "resume"):
                note(_about(event))  # above the board, which fits 24 lines without
            elif event["event"] == "alarm":
                _tell(event, num_steps)
            if "loss" not in event or event["event"] != "progress" or time.monotonic() - drawn_at > _REDRAW_S:
                live.start()  # not before: a run that is refused has no event
                live.update(board.draw(), refresh=True)
                drawn_at = time.monotonic()

        try:
            yield show
        finally:
            live.stop()


def _tell(event: "Event", num_steps: int) -> None:
    """Write an event's sentence, if it has one, to stderr: an alarm's as a warning, a beginning's in filled lines."""
    write = {"alarm": warn, "start": note_paragraph, "resume": note_paragraph}.get(event["event"], note)
    if sentence := _sentence(event, num_steps):
        write(sentence)


class Board:
    """The live view: latest metrics, the curve of the loss or the reward, and the latest sample."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.step: dict[str, Any] = {}
        self.curve: deque[float] = deque(maxlen=10_000)
        self.validation: float | None = None
        self.best: tuple[int, float] | None = None  # step and loss
        self.sample = self.notice = ""
        self.alarms: dict[str, int] = {}  # active alarms, and the steps at which they were raised
        self.next_step = f"the next step is running; {num_steps:,} in all"

    def take(self, event: "Event") -> None:
        """Update the view from a training event."""
        kind = event["event"]
        if "loss" in event and kind in ("step", "progress"):
            self.step |= event
            self.curve.append(event.get("reward", event["loss"]))
        elif kind == "progress":
            self.notice = f"{event['doing']} …"
        elif kind == "validation":
            self.validation = event["loss"]
            if event["best"]:
                self.best = event["step"], event["loss"]
        elif kind in ("sample", "group"):
            text = _group(event) if kind == "group" else _sample(event)
            self.sample = text if kind == "group" or len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
        elif kind == "alarm":
            self.alarms[event["alarm"]] = event["step"]
        elif kind == "alarm_over":
            self.alarms.pop(event["alarm"], None)
        elif kind == "end" and event["signal"] is None:
            self.next_step = "none is left"
        if kind in ("saved", "skipped", "resume"):
            self.notice = _sentence(event, self.num_steps)
        elif kind in ("validation", "sample", "group"):
            self.notice = ""
        if kind == "resume" and event["best_loss"] is not None:
            self.best = event["best_step"], event["best_loss"]

    def draw(self) -> "RenderableType":
        """Return the view as a rich renderable."""
        from rich.console import Group
        from rich.text import Text

        name = "reward" if "reward" in self.step else "loss"
        curve = Text(f"{name} {sparkline(self.curve)}" if self.curve else "")
        notice, sample = (Text(printable(text), "dim") for text in (self.notice, self.sample))
        if name == "reward":  # a row is an answer
            sample.no_wrap, sample.overflow = True, "ellipsis"
        return Group(table("", "", rows=self._numbers()), curve, notice, sample)

    def _numbers(self) -> list[tuple[str, str]]:
        if not (step := self.step):
            return [("step", self.next_step)]
        name, sign = measured("reward" in step)
        newest = "" if self.validation is None else f"{sign * self.validation:z.4f}"
        best = "" if self.best is None else f"best {sign * self.best[1]:z.4f} at step {self.best[0]:,}"
        return [
            ("step", f"{step['step']:,} of {self.num_steps:,}, epoch {step['epoch']:.2f}"),
            *_rewards(step),
            ("loss", f"{step['loss']:z.4f}{_preference(step)}"),
            *([(name, "; ".join(filter(None, (newest, best))))] if newest or best else []),
            ("gradient norm", f"{step['grad_norm']:.3f}"),
            ("learning rate", f"{step['learning_rate']:.3g}"),
            ("tokens/s", f"{step['tokens_per_s']:,.0f}" + (f", MFU {step['mfu']:.1%}" if step.get("mfu") else "")),
            ("time", f"{duration(step['seconds'])}, {duration(step['seconds_left'])} left"),
            *(
                [("alarms", "; ".join(f"{a} since step {at:,}" for a, at in self.alarms.items()))]
                if self.alarms
                else []
            ),
        ]


def sparkline(numbers: Iterable[float]) -> str:
    """Draw numbers as a line of block characters, each the mean of an interval, scaled from minimum to maximum.

    A stretch with a number that is not finite is a blank.
    """
    values = list(numbers)
    width = min(_WIDTH, len(values))
    parts = [values[i * len(values) // width : (i + 1) * len(values) // width] for i in range(width)]
    means = [sum(part) / len(part) for part in parts]
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    span = (high - low) or 1.0
    return "".join(_BLOCKS[min(7, int(8 * ((mean - low) / span)))] if mean in finite else " " for mean in means)


def _preference(event: "Event") -> str:
    """Return the accuracy and the margin of DPO, if present."""
    template = " ({reward_accuracy:.0%} of pairs right, margin {reward_margin:z.3f})"
    return template.format_map(event) if "reward_accuracy" in event else ""


def measured(is_rewarded: bool) -> tuple[str, int]:
    """Return the name of what a validation measures, and the sign of its loss in that."""
    return ("validation reward", -1) if is_rewarded else ("validation loss", 1)


def _rewards(event: "Event") -> list[tuple[str, str]]:
    """Say what answers were worth, how long they were, and how far the model has moved; a name and a text each."""
    if "reward" not in event:
        return []
    some = f"; {event['equal_groups']:.0%} of the groups have equal rewards" if event["equal_groups"] else ""
    equal = "; all groups equal: nothing is learned" if event["equal_groups"] == 1 else some
    failed = f"; {event['rewards_failed']} without one" if event["rewards_failed"] else ""
    by_function = ", ".join(f"{name} {_number(value)}" for name, value in _parts(event).items())
    cut = f" ({event['cut']:.0%} of the answers cut off at --max-tokens)" if event["cut"] else ""
    return [
        ("reward", f"{event['reward']:z.3f} (spread {event['reward_spread']:.3f}{equal}{failed})"),
        *([("by function", by_function)] if by_function else []),
        ("length", f"{event['length']:.1f} tokens{cut}"),
        *([("KL", f"{event['kl']:z.4f}")] if "kl" in event else []),
        ("log P", f"differs by {event['largest_difference']:.1e} at most between sampling and training"),
    ]


def _parts(event: "Event") -> dict[str, float]:
    """Return the mean of each reward function by name, if there are several."""
    return {name.removeprefix("reward/"): value for name, value in event.items() if name.startswith("reward/")}


def _number(value: float) -> str:
    return f"{value:z.3f}" if math.isfinite(value) else "-"


def _group(event: "Event") -> str:
    """Return a prompt's answers, best first, a line each, below a heading: reward, advantage, text."""
    lines = [f"   reward advantage  answer to {quote(event['prompt'])}"]
    for a in sorted(event["answers"], key=lambda answer: -answer["advantage"]):
        reward = "-" if a["reward"] is None else f"{a['reward']:z.3g}"
        lines.append(f"{reward:>9} {a['advantage']:+z9.2f}  {escape(a['text'], sys.maxsize)}")
    return "\n".join(lines)


def _sample(event: "Event") -> str:
    """Return a sample, named, and its prompt where that is more than blanks."""
    of = f" of {quote(event['prompt'])}" if event["prompt"].strip() else ""
    return f"sample{of}: {event.get('text', event.get('error'))}"


def _sentence(event: "Event", num_steps: int) -> str:
    kind, step = event["event"], event["step"]
    if kind == "step":
        mfu = f", MFU {event['mfu']:.1%}" if event["mfu"] else ""
        rewards = "".join(f"{name} {text}, " for name, text in _rewards(event))
        return (
            f"step {step}/{num_steps}: {rewards}loss {event['loss']:z.4f}{_preference(event)}, "
            f"norm {event['grad_norm']:.2f}, lr {event['learning_rate']:.2g}, "
            f"{event['tokens_per_s']:,.0f} tokens/s{mfu}, {duration(event['seconds_left'])} left"
        )
    if kind == "validation":
        best = ", the best so far" if event["best"] else ""
        name, sign = measured("reward" in event)
        return f"step {step}: {name} {sign * event['loss']:z.4f}{_preference(event)}{best}"
    if kind == "group":
        return f"step {step}: answers to a prompt, best first\n{_group(event)}"
    if kind == "sample":
        return f"step {step}: {_sample(event)}"
    if kind == "progress" and "signal" in event:
        return f"step {step}: {event['doing']}"
    if kind == "saved":
        return f"step {step}: saved {Path(event['path']).name}"
    if kind == "skipped":
        return _skipped(event)
    if kind == "alarm":
        return f"step {step}: {event['message']}"
    if kind == "resume":
        return "; ".join(filter(None, (f"resumed at step {step}", _threads(event))))
    return _about(event) if kind == "start" else ""


def _skipped(event: "Event") -> str:
    """Say why a step changed nothing; of several in a row without a signal, say it once."""
    if event["reason"] == "no signal" and event["in_a_row"] > 1:
        return ""
    why = {
        "not finite": f"gradients are not finite (loss {event['loss']})",
        "no labels": "no token of its rows has a label",
        "no signal": "no learning signal, as the gradient is zero",
    }[event["reason"]]
    return f"step {event['step']}: {why}; the weights were left alone"


def _about(event: "Event") -> str:
    """Say what is trained and on what, a line each: sizes, dtype, optimizer, sampler, threads, sources of the data."""
    settings, reason = event["settings"], event["optimizer_reason"] and f" ({event['optimizer_reason']})"
    trained = "" if event["trainable"] == event["parameters"] else f" ({event['trainable']:,} trained)"
    name, rate = {"adamw": "AdamW", "muon": "Muon"}[settings["optimizer"]], settings["muon_learning_rate"]
    lines = (
        f"{event['parameters']:,} parameters{trained}, {counted(event['rows'], 'row')} an epoch, "
        f"{event['tokens_per_step']:,} tokens a step, on {event['device']}",
        "matrix products in bfloat16 (--precision float32 for float32)" * (settings["precision"] == "bfloat16"),
        f"{name}, learning rate {rate or settings['learning_rate']:g}{reason}",
        f"answers sampled by {event['sampler']}" if "sampler" in event else "",
        _threads(event),
        _mixture(event),
    )
    return "\n".join(line for line in lines if line)


def _mixture(event: "Event") -> str:
    """Say how a mixture stands: "data: 80.0% a.jsonl (1,200 tokens, 1.6 passes an epoch), 20.0% ..."."""
    template = "{share:.1%} {source} ({tokens:,} tokens, {passes:.3g} passes an epoch)"
    parts = ", ".join(template.format_map(part) for part in event.get("data", {}).get("sources", ()))
    return parts and f"data: {parts}"


def _threads(event: "Event") -> str:
    """Say how many threads compute, and why: "1 thread, chosen by timing 4 rows: 0.53 s (2 threads: 1.2 s)".

    Chosen are the fewest that take at most a twentieth longer than the fastest number.
    """
    if "threads" not in event:
        return ""
    count, why, seconds = event["threads"], event["threads_why"], dict(event["threads_seconds"])
    if not seconds:
        return counted(count, "thread") + _WITHOUT_TIMING.get(why, f", {why}")
    rows, own_seconds = event["threads_rows"], seconds.pop(str(count))
    other_times = ", ".join(
        f"{counted(int(num_threads), 'thread')}: {value:.2g} s" for num_threads, value in seconds.items()
    )
    return f"{counted(count, 'thread')}, chosen by timing {counted(rows, 'row')}: {own_seconds:.2g} s ({other_times})"
