"""Run training from the command line; shared by the training commands."""

import argparse
import math
import shlex
import signal
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

from llamarium.cli.output import emit, note, note_paragraph, warn
from llamarium.cli.threads import set_threads
from llamarium.cli.training_view import measured, view
from llamarium.errors import counted
from llamarium.hub.folders import is_adapter
from llamarium.train.conduct import conduct, init_process_group
from llamarium.train.config import GRPOConfig, RunConfig
from llamarium.train.distributed.process_group import ProcessGroup
from llamarium.train.journal import Emit, Event, is_passing
from llamarium.train.run import TrainingResult
from llamarium.train.setup import Setup
from llamarium.train.trackers import trackers


def follow(config: RunConfig, args: argparse.Namespace, prepare: Callable[[ProcessGroup], Setup]) -> int:
    """Run training and return the exit code: 0, or 128 plus the signal that stopped it."""
    set_threads(config.threads)

    def prepared(process_group: ProcessGroup) -> Setup:
        nonlocal config
        setup = prepare(process_group)
        config = setup.config  # whose steps are counted, if they were given as epochs or tokens
        return setup

    @contextmanager
    def watch(tracking: Iterable[Emit]) -> Generator[Emit]:
        with watching(config.steps, tracking, json=args.json) as tell:
            yield tell

    with init_process_group(config) as process_group:
        # an absolute path, because a reward function may change the working directory
        is_first, folder, out = (
            process_group.is_rank_zero,
            args.out,
            args.out.absolute(),
        )
        if is_first and args.resume and not out.exists():
            note(f"no run in {folder} yet: this begins one")
        with trackers(args.report_to if is_first else (), out) as tracking:
            ending = conduct(
                lambda: prepared(process_group),
                out,
                process_group=process_group,
                resume=args.resume,
                allow_changes=args.allow_changes,
                watch=watch(tracking),
            )
    stopped_by = ending.signal if ending.position.step < config.steps else None
    if is_first:
        _tell_end(config, ending, folder, stopped_by)
        if stopped_by is not None or ending.was_over:
            run = "llamarium" if (n := process_group.world_size) == 1 else f"torchrun --nproc-per-node {n} -m llamarium"
            command = type(config).__name__.removesuffix("Config").lower()
            longer = " --patience 0" if ending.position.step < config.steps else " --allow-changes --steps N"
            purpose, flags = ("train it for longer", longer) if ending.was_over else ("go on with it", "")
            note_paragraph(f"{purpose}: {run} {command} --out {shlex.quote(str(folder))} --resume{flags}")
        _advise(out / "best" if (out / "best").is_dir() else ending.checkpoint, folder, talks=ending.chat)
    return 0 if stopped_by is None else 128 + stopped_by


def _tell_end(config: RunConfig, ending: TrainingResult, folder: Path, stopped_by: int | None) -> None:
    """Print where a run ended, its checkpoint, and its best validation."""
    at, (name, sign) = ending.position, measured(isinstance(config, GRPOConfig))
    best = "" if math.isinf(at.best_loss) else f"; best {name} {sign * at.best_loss:z.4f} at step {at.best_step}"
    without = f"; {at.num_without_signal:,} of them had no learning signal and changed nothing" * (
        at.num_without_signal > 0
    )
    early = f"; ended early: no better one in {config.patience} validations" if at.step < config.steps else ""
    if stopped_by is None:
        prefix = "nothing is left to do; " * ending.was_over
        note_paragraph(
            f"{prefix}{counted(at.step, 'step')} done: {folder / ending.checkpoint.name}{best}{early}{without}"
        )
    else:
        by = "Ctrl-C" if stopped_by == signal.SIGINT else signal.Signals(stopped_by).name
        note_paragraph(f"{by} at step {at.step}: saved {folder / ending.checkpoint.name}{best}")


def _advise(checkpoint: Path, folder: Path, *, talks: bool) -> None:
    """Name commands that use a checkpoint of the folder `named`, as it was given; `talks`: dialogs were learned."""
    is_on_base = is_adapter(checkpoint)
    name = f"{'--adapter' if is_on_base else '-m'} {shlex.quote(str(folder / checkpoint.name))}"
    note_paragraph(
        f"talk to it: llamarium chat {name}" if talks else f"continue a text with it: llamarium generate {name} TEXT"
    )
    if is_on_base:
        note_paragraph(f"merge it into a model: llamarium merge {name} --dtype float32 --out MODEL")


def harmless(watcher: Emit) -> Emit:
    """Disable a watcher with a warning once it has failed."""
    failed: list[Exception] = []

    def tell(event: Event) -> None:
        if failed:
            return
        try:
            watcher(event)
        except Exception as error:  # noqa: BLE001 - another package's, or a closed pipe
            failed.append(error)
            warn(f"{type(error).__name__}: {error}: it gets no more events of this run")

    return tell


@contextmanager
def watching(num_steps: int, trackers: Iterable[Emit], *, json: bool, **labels: str) -> Generator[Emit]:
    """Yield a function that shows a run's events on the terminal, or as JSON on stdout, and passes them to trackers.

    A tracker that fails ends no run. With `json` there is a line an event, which the labels begin, and no view; what a
    signal does is said on stderr.
    """
    with view(num_steps, quiet=json) as show:
        first: Emit = (lambda event: emit({**labels, **event})) if json else show
        watchers = [harmless(watcher) for watcher in (first, *trackers)]

        def tell(event: Event) -> None:
            if json and is_passing(event) and "signal" in event:
                note(f"step {event['step']}: {event['doing']}")
            for watcher in watchers[: not json] if is_passing(event) else watchers:
                watcher(event)

        yield tell
