"""What a run looks like while it learns: on a terminal a few lines that stay in place, elsewhere a line at a time."""

import math
import sys
import time
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from llamarium.cli.output import draws, note, printable, table
from llamarium.train.report.page import duration

if TYPE_CHECKING:
    from rich.console import RenderableType

    from llamarium.train.report.journal import Emit, Event

_WIDTH = 60  # of the curve, in characters
_REDRAW_S = 0.2  # seconds between drawings of steps that follow each other quickly
_WITHOUT_TIMING = {"all": "", "as the first": ", as the first run", "compiled": ", not timed as the step is compiled"}
_BLOCKS = "▁▂▃▄▅▆▇█"


@contextmanager
def view(num_steps: int, *, quiet: bool) -> "Generator[Emit]":
    """Yield what shows events on stderr, or shows nothing if `quiet`."""
    if quiet:
        yield lambda event: None
    elif not draws(sys.stderr):
        yield lambda event: note(sentence) if (sentence := _sentence(event, num_steps)) else None
    else:
        from rich.console import Console
        from rich.live import Live

        console = Console(file=sys.stderr, markup=False, emoji=False, highlight=False)
        board = Board(num_steps)
        with Live(board.draw(), console=console, auto_refresh=False, transient=False) as live:
            drawn = 0.0

            def show(event: "Event") -> None:
                nonlocal drawn
                board.take(event)
                if "loss" not in event or event["event"] != "progress" or time.monotonic() - drawn > _REDRAW_S:
                    live.update(board.draw(), refresh=True)
                    drawn = time.monotonic()

            yield show


class Board:
    """The lines that stay in place: the newest numbers, the curve of the loss, the newest sample."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.step: dict[str, Any] = {}
        self.losses: deque[float] = deque(maxlen=10_000)
        self.validation: float | None = None
        self.best: tuple[int, float] | None = None  # step and loss
        self.sample = ""
        self.notice = ""
        self.about = ""
        self.next_step = f"the next one is being computed; {num_steps:,} in all"

    def take(self, event: "Event") -> None:
        """Update the numbers from a training event."""
        kind = event["event"]
        if "loss" in event and kind in ("step", "progress"):
            self.step |= event
            self.losses.append(event["loss"])
        elif kind == "progress":
            self.notice = f"{event['doing']} …"
        elif kind in ("start", "resume"):
            self.about = _about(event)
        elif kind == "validation":
            self.validation = event["loss"]
            if event["best"]:
                self.best = event["step"], event["loss"]
        elif kind in ("sample", "group"):
            self.sample = _group(event) if kind == "group" else event.get("text", event.get("error", ""))
        elif kind == "end" and event["signal"] is None:
            self.next_step = "none is left"
        if kind in ("saved", "skipped", "resume"):
            self.notice = _sentence(event, self.num_steps)
        elif kind in ("validation", "sample", "group"):
            self.notice = ""
        if kind == "resume" and event["best_loss"] is not None:
            self.best = event["best_step"], event["best_loss"]

    def draw(self) -> "RenderableType":
        """Return the board as rich's renderable."""
        from rich.console import Group
        from rich.text import Text

        shown = table("", "", rows=self._numbers())
        curve = Text(sparkline(list(self.losses)))
        shown_sample = printable(self.sample)
        sample = Text(shown_sample[:600] + "…" * (len(shown_sample) > 600), style="dim")
        notice = Text(printable(self.notice), style="dim")
        return Group(Text(printable(self.about), style="dim"), shown, curve, notice, sample)

    def _numbers(self) -> list[tuple[str, str]]:
        step = self.step
        if not step:
            return [("step", self.next_step)]
        rows = [
            ("step", f"{step['step']:,} of {self.num_steps:,}, epoch {step['epoch']:.2f}"),
            *_rewards(step),
            ("loss", f"{step['loss']:.4f}{_preference(step)}"),
        ]
        name, sign = measured("reward" in step)
        found = [] if self.validation is None else [f"{sign * self.validation:.4f}"]
        if self.best is not None:
            found.append(f"best {sign * self.best[1]:.4f} at step {self.best[0]:,}")
        if found:
            rows.append((name, "; ".join(found)))
        return [
            *rows,
            ("gradient norm", f"{step['grad_norm']:.3f}"),
            ("learning rate", f"{step['learning_rate']:.3g}"),
            ("tokens/s", f"{step['tokens_per_s']:,.0f}" + (f", MFU {step['mfu']:.1%}" if step.get("mfu") else "")),
            ("time", f"{duration(step['seconds'])}, {duration(step['seconds_left'])} left"),
        ]


def sparkline(values: list[float]) -> str:
    """Draw numbers as a line of blocks, the mean of each stretch, from the lowest to the highest.

    A stretch with a number that is not finite is a blank.
    """
    if not values:
        return ""
    width = min(_WIDTH, len(values))
    parts = [values[i * len(values) // width : (i + 1) * len(values) // width] for i in range(width)]
    means = [sum(part) / len(part) for part in parts]
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    span = (high - low) or 1.0
    return "".join(_BLOCKS[min(7, int(8 * ((mean - low) / span)))] if mean in finite else " " for mean in means)


def _preference(event: "Event") -> str:
    """Return the share of pairs ranked right, and the margin, where pairs are learned."""
    if "reward_accuracy" not in event:
        return ""
    return f" ({event['reward_accuracy']:.0%} of pairs right, margin {event['reward_margin']:.3f})"


def measured(is_rewarded: bool) -> tuple[str, int]:
    """Return the name of what a validation measures, and the sign of its loss in that."""
    return ("validation reward", -1) if is_rewarded else ("validation loss", 1)


def _rewards(event: "Event") -> list[tuple[str, str]]:
    """Say what answers were worth, how long they were, and how far the model has moved; a name and a text each."""
    if "reward" not in event:
        return []
    equal = f"; {event['equal_groups']:.0%} of the groups have equal rewards" if event["equal_groups"] else ""
    failed = f"; {event['rewards_failed']} without one" if event["rewards_failed"] else ""
    cut = f" ({event['cut']:.0%} of the answers cut off at --max-tokens)" if event["cut"] else ""
    return [
        ("reward", f"{event['reward']:.3f} (spread {event['reward_spread']:.3f}{equal}{failed})"),
        ("length", f"{event['length']:.1f} tokens{cut}"),
        *([("KL", f"{event['kl']:.4f}")] if "kl" in event else []),
        ("log P", f"differs by {event['largest_difference']:.1e} at most between sampling and training"),
    ]


def _group(event: "Event") -> str:
    """Return a prompt and its answers, best first, a line each: reward, advantage, text."""
    ranked = sorted(event["answers"], key=lambda answer: -answer["advantage"])
    lines = (
        f"{'-' if a['reward'] is None else format(a['reward'], '.3g')} ({a['advantage']:+.2f}) {a['text']}"
        for a in ranked
    )
    return "\n".join([event["prompt"], *lines])


def _sentence(event: "Event", num_steps: int) -> str:
    kind, step = event["event"], event["step"]
    if kind == "step":
        mfu = f", MFU {event['mfu']:.1%}" if event["mfu"] else ""
        rewards = "".join(f"{name} {text}, " for name, text in _rewards(event))
        return (
            f"step {step}/{num_steps}: {rewards}loss {event['loss']:.4f}{_preference(event)}, "
            f"norm {event['grad_norm']:.2f}, lr {event['learning_rate']:.2g}, "
            f"{event['tokens_per_s']:,.0f} tokens/s{mfu}, {duration(event['seconds_left'])} left"
        )
    if kind == "validation":
        best = ", the best so far" if event["best"] else ""
        name, sign = measured("reward" in event)
        return f"step {step}: {name} {sign * event['loss']:.4f}{_preference(event)}{best}"
    if kind == "group":
        return f"step {step}: answers to a prompt, with reward (advantage): {_group(event)}"
    if kind == "sample":
        return f"step {step}: sample: {event.get('text', event.get('error'))}"
    if kind == "saved":
        return f"step {step}: saved {event['path']}"
    if kind == "skipped":
        finite = math.isfinite(event["grad_norm"])
        why = "no token of its rows has a label" if finite else f"gradients are not finite (loss {event['loss']})"
        return f"step {step}: {why}; the weights were left alone"
    if kind == "resume":
        return "; ".join(filter(None, (f"resumed at step {step}", _threads(event))))
    return _about(event) if kind == "start" else ""


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
    parts = [
        f"{part['share']:.1%} {part['source']} ({part['tokens']:,} tokens, {part['passes']:.3g} passes an epoch)"
        for part in event.get("data", {}).get("sources", ())
    ]
    return f"data: {', '.join(parts)}" if parts else ""


def _threads(event: "Event") -> str:
    """Say how many threads compute, and why: "1 thread, chosen by timing 4 rows: 0.53 s (2 threads: 1.2 s)".

    Chosen are the fewest that take at most a twentieth longer than the fastest number.
    """
    if "threads" not in event:
        return ""
    count, why, seconds = event["threads"], event["threads_why"], dict(event["threads_seconds"])
    if not seconds:
        return counted(count, "thread") + _WITHOUT_TIMING.get(why, f", {why}")
    rows, own = event["threads_rows"], seconds.pop(str(count))
    others = ", ".join(f"{counted(int(other), 'thread')}: {value:.2g} s" for other, value in seconds.items())
    return f"{counted(count, 'thread')}, chosen by timing {counted(rows, 'row')}: {own:.2g} s ({others})"


def counted(count: int, what: str) -> str:
    """Return "1 row", "2,000 rows"."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"
