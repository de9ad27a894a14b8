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
        yield lambda event: _tell(event, num_steps)
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
        elif kind == "sample":
            self.sample = event.get("text", event.get("error", ""))
        elif kind == "group":
            self.sample = _group(event)
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
            return [("step", f"the next one is being computed; {self.num_steps:,} in all")]
        rows = [
            ("step", f"{step['step']:,} of {self.num_steps:,}, epoch {step['epoch']:.2f}"),
            ("loss", f"{step['loss']:.4f}{_preference(step)}"),
        ]
        if "reward" in step:
            rows.insert(1, ("reward", _rewards(step)))
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


def _tell(event: "Event", num_steps: int) -> None:
    if sentence := _sentence(event, num_steps):
        note(sentence)


def _preference(event: "Event") -> str:
    """Return the share of pairs ranked right, and the margin, where pairs are learned."""
    if "reward_accuracy" not in event:
        return ""
    return f" ({event['reward_accuracy']:.0%} of pairs right, margin {event['reward_margin']:.3f})"


def measured(is_rewarded: bool) -> tuple[str, int]:
    """Return the name of what a validation measures, and the sign of its loss in that."""
    return ("validation reward", -1) if is_rewarded else ("validation loss", 1)


def _rewards(event: "Event") -> str:
    """Say what answers were worth, how far the model has moved, and how far apart sampling and training passes are."""
    counts = {
        f"{event['equal_groups']:.0%} of the groups equal": event["equal_groups"],
        f"{event['cut']:.0%} cut": event["cut"],
        f"{event['rewards_failed']} without a reward": event["rewards_failed"],
    }
    kl = f"KL {event['kl']:.4f}, " if "kl" in event else ""
    return ", ".join(
        [
            f"{event['reward']:.3f} (spread {event['reward_spread']:.3f})",
            f"{kl}{event['length']:.1f} tokens, passes differ by {event['largest_difference']:.1e}",
            *(words for words, count in counts.items() if count),
        ]
    )


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
        rewards = f"reward {_rewards(event)}, " if "reward" in event else ""
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
        return f"step {step}: a group: {_group(event)}"
    if kind == "sample":
        return f"step {step}: sample: {event.get('text', event.get('error'))}"
    if kind == "saved":
        return f"step {step}: saved {event['path']}"
    if kind == "skipped":
        finite = math.isfinite(event["grad_norm"])
        why = "no token of its rows has a label" if finite else f"gradients are not finite (loss {event['loss']})"
        return f"step {step}: {why}; the weights were left alone"
    if kind == "resume":
        return f"resumed at step {step}{_threads(event)}"
    if kind == "start":
        return _about(event)
    return ""


def _about(event: "Event") -> str:
    trained = "" if event["trainable"] == event["parameters"] else f" ({event['trainable']:,} trained)"
    sampler = f", answers sampled by {event['sampler']}" if "sampler" in event else ""
    return (
        f"{event['parameters']:,} parameters{trained}, {_counted(event['rows'], 'row')} an epoch, "
        f"{event['tokens_per_step']:,} tokens a step, on {event['device']}{_recipe(event)}{sampler}"
        f"{_threads(event)}{_mixture(event)}"
    )


def _mixture(event: "Event") -> str:
    """Say how a mixture stands: "; 80.0% a.jsonl (1,200 tokens, 1.6 passes an epoch), 20.0% ..."."""
    parts = [
        f"{part['share']:.1%} {part['source']} ({part['tokens']:,} tokens, {part['passes']:.3g} passes an epoch)"
        for part in event.get("data", {}).get("sources", ())
    ]
    return f"; {', '.join(parts)}" if parts else ""


def _recipe(event: "Event") -> str:
    """Name what products are computed in, where not float32, the optimizer, its peak rate, and why it was chosen."""
    settings, reason = event["settings"], event["optimizer_reason"] and f" ({event['optimizer_reason']})"
    half = ", products in bfloat16 (--precision float32 for float32)" * (settings["precision"] == "bfloat16")
    name, rate = {"adamw": "AdamW", "muon": "Muon"}[settings["optimizer"]], settings["muon_learning_rate"]
    return f"{half}, {name} at {rate or settings['learning_rate']:g}{reason}"


def _threads(event: "Event") -> str:
    """Say how many threads compute, and why so many: "; 1 thread, the best now: 0.53 s for 4 rows (2 threads: 1.2 s)".

    The best are the fewest that take at most a twentieth longer than the fastest number.
    """
    if "threads" not in event:
        return ""
    count, why = event["threads"], event["threads_why"]
    named = f"; {_counted(count, 'thread')}"
    seconds = dict(event["threads_seconds"])
    if not seconds:
        return named + _WITHOUT_TIMING.get(why, f", {why}")
    rows, own = event["threads_rows"], seconds.pop(str(count))
    others = ", ".join(f"{_counted(int(other), 'thread')}: {value:.2g} s" for other, value in seconds.items())
    return f"{named}, the best now: {own:.2g} s for {_counted(rows, 'row')} ({others})"


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
