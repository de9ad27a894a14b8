"""Train the same model with one thing changed, and compare the runs on one page.

  tied     the head is the embedding table, or a matrix of its own
  rope     RoPE, or nothing that tells positions
  causal   a token sees those before it, or its whole row: then it cheats
  heads    MHA, GQA and MQA: loss, cache and speed
  norm     RMSNorm, LayerNorm, or none
  depth    half as many layers, as many, and twice as many
  width    a quarter, half, once and twice the width
  parts    layers of attention, of an MLP, or of both
  ngrams   counts of 2, 4 and 6 tokens beside a Llama

The verdict says which variants differ by more than seeds do (--seeds).
The runs live in OUT/EXPERIMENT/VARIANT, the page is OUT/EXPERIMENT/report.html.
Ctrl-C saves and ends; --resume goes on, and does not repeat what is done.

  llamarium experiment rope
  llamarium experiment heads --data story.txt --steps 1000 --seeds 3
  llamarium experiment tied --embedding-std 1
  llamarium experiment ngrams --data shakespeare --steps 2000
  llamarium experiment causal --out runs --resume
"""

import argparse
import shlex
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from llamarium.cli.options import add_json, importing_torch, named_folder
from llamarium.cli.output import emit, note, say, show, table
from llamarium.cli.settings import add_report_to, add_settings, given_settings, settings_file
from llamarium.cli.threads import set_threads
from llamarium.train.config import ExperimentConfig

if TYPE_CHECKING:
    from llamarium.train.experiments.running import Outcome
    from llamarium.train.report.journal import Emit

NAMES = ("tied", "rope", "causal", "heads", "norm", "depth", "width", "parts", "ngrams")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("experiment", choices=NAMES, metavar="EXPERIMENT", help="what is changed")
    parser.add_argument("--out", type=named_folder, default="runs", metavar="FOLDER", help="where (default: runs)")
    parser.add_argument("--resume", action="store_true", help="go on with what an earlier call has left undone")
    parser.add_argument("--allow-changes", action="store_true", help="resume with other settings or data")
    add_report_to(parser)
    add_json(parser)
    add_settings(parser, ExperimentConfig)


def run(args: argparse.Namespace) -> int:
    """Train the variants and compare them."""
    out: Path = (args.out / args.experiment).absolute()
    settings = given_settings(args, ExperimentConfig)
    config = ExperimentConfig.resolve(settings_file(args, out / "experiment.toml"), settings)
    with importing_torch():
        from llamarium.cli.training import watching
        from llamarium.train.experiments.running import run_experiment
        from llamarium.train.report.trackers import trackers

    @contextmanager
    def watch(variant: str) -> "Generator[Emit]":
        note(f"{args.experiment}: {variant}")
        with (
            trackers(args.report_to, out / variant) as tracking,
            watching(config.steps, tracking, json=args.json, variant=variant) as tell,
        ):
            yield tell

    set_threads(config.threads)
    outcome = run_experiment(
        args.experiment, config, out, resume=args.resume, allow_changes=args.allow_changes, watch=watch
    )
    if outcome.signal is not None:
        where = shlex.quote(str(args.out))
        note(f"saved; go on with it: llamarium experiment {args.experiment} --out {where} --resume")
        return 128 + outcome.signal
    if args.json:
        arms = {label: asdict(arm) for label, arm in outcome.arms.items()}
        emit({"event": "report", "path": str(outcome.report), "arms": arms, "verdict": outcome.verdict})
    else:
        _print(outcome)
    note(f"report: {args.out / args.experiment / 'report.html'}")
    return 0


def _print(outcome: "Outcome") -> None:
    from llamarium.train.experiments.verdict import spread_of

    rows = ((k, f"{arm.parameters:,}", spread_of(arm.losses) if arm.losses else "-") for k, arm in outcome.arms.items())
    show(table("", "parameters", "validation loss", right=("parameters", "validation loss"), rows=rows))
    if outcome.verdict:
        say(f"\n{outcome.verdict}")
