"""What `pretrain` and `finetune` share: a run from the shell, from its lock to its exit code."""

import argparse
import signal
from collections.abc import Callable
from pathlib import Path

from llamarium.cli.options import set_threads
from llamarium.cli.output import emit as emit_json
from llamarium.cli.output import note, warn
from llamarium.cli.training_view import view
from llamarium.errors import OutputError
from llamarium.train.config import RunConfig
from llamarium.train.journal import Journal
from llamarium.train.lock import RunLock
from llamarium.train.run import Emit, Ending, Event, Setup, check_start
from llamarium.train.run import run as train
from llamarium.train.team import Solo, gathered
from llamarium.train.trackers import trackers
from llamarium.weights.files import atomic_file


def follow(config: RunConfig, args: argparse.Namespace, prepare: Callable[[Solo], Setup]) -> int:
    """Run to the end and return the exit code: 0, or 128 and the signal that ended it early.

    Raises:
        LlamariumError: Whatever the run raises.
    """
    set_threads(config.threads)
    with gathered(config) as team:
        ending = _lead(config, args, team, prepare) if team.is_first else _help(args, team, prepare)
    if not team.is_first:
        return 0 if ending.signal is None else 128 + ending.signal
    at = ending.position
    if ending.signal is not None and at.step < config.steps:
        name = "Ctrl-C" if ending.signal == signal.SIGINT else signal.Signals(ending.signal).name
        note(f"{name} at step {at.step}: saved {ending.checkpoint}; go on with --resume")
        return 128 + ending.signal
    best = "" if at.best_step is None else f"; best validation loss {at.best_loss:.4f} at step {at.best_step}"
    note(f"{at.step} steps done: {ending.checkpoint}{best}")
    if (ending.checkpoint / "adapter_config.json").exists():
        note(f"talk to it: llamarium chat --adapter {ending.checkpoint}")
        note(f"a model of it: llamarium merge --adapter {ending.checkpoint} --out MODEL")
    return 0


def harmless(watcher: Emit) -> Emit:
    """Let a watcher that fails be left out from then on, with a warning: no view is worth a run."""
    failed: list[Exception] = []

    def tell(event: Event) -> None:
        if failed:
            return
        try:
            watcher(event)
        except Exception as error:  # noqa: BLE001 - another package's
            failed.append(error)
            warn(f"{type(error).__name__}: {error}: it is told nothing more of this run")

    return tell


def _lead(config: RunConfig, args: argparse.Namespace, team: Solo, prepare: Callable[[Solo], Setup]) -> Ending:
    """Train, and write everything that is written."""
    out: Path = args.out
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{out}: cannot be made: {error.strerror}") from None
    with RunLock(out), trackers(args.report_to, out) as tracking:
        check_start(out, args.resume)
        setup = team.prepare(lambda: prepare(team))
        with view(config.steps, quiet=args.json) as show:
            watchers: list[Emit] = [Journal(out), emit_json if args.json else show, *map(harmless, tracking)]

            def tell(event: Event) -> None:
                if event["event"] in ("start", "resume"):  # the run is accepted
                    with atomic_file(out / "train.toml") as file:
                        file.write(config.to_toml().encode())
                for watcher in watchers:
                    watcher(event)

            ending = train(setup, out, resume=args.resume, allow_changes=args.allow_changes, emit=tell)
        if args.report:
            from llamarium.train.report import write_report

            note(f"report: {write_report(out)}")
    return ending


def _help(args: argparse.Namespace, team: Solo, prepare: Callable[[Solo], Setup]) -> Ending:
    """Train in step with the first process, and write nothing."""
    setup = team.prepare(lambda: prepare(team))
    return train(setup, args.out, resume=args.resume, allow_changes=args.allow_changes, emit=lambda event: None)
