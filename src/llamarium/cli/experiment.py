"""Train the same model with one thing changed, and compare the runs on one page.

  tied     the head is the embedding table, or a matrix of its own
  rope     RoPE, or nothing that tells positions
  causal   a token sees those before it, or its whole row: then it cheats
  heads    MHA, GQA and MQA: loss, cache and speed
  norm     RMSNorm, or none

The runs live in OUT/EXPERIMENT/VARIANT, the page is OUT/EXPERIMENT/report.html.
Ctrl-C saves and ends; --resume goes on, and does not repeat what is done.

  llamarium experiment rope
  llamarium experiment heads --data story.txt --steps 1000
  llamarium experiment causal --out runs --resume
"""

import argparse
import dataclasses
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamarium.cli.options import add_json, importing_torch
from llamarium.cli.output import emit, note
from llamarium.cli.settings import add_report_to, add_settings, given_settings, named_folder, settings_file
from llamarium.cli.threads import set_threads
from llamarium.train.config import PretrainConfig

if TYPE_CHECKING:
    from llamarium.train.setup import Emit

NAMES = ("tied", "rope", "causal", "heads", "norm")


def _default(name: str, value: Any) -> Any:
    """Give a setting another default; its help and its range stay."""
    item = next(item for item in dataclasses.fields(PretrainConfig) if item.name == name)
    return dataclasses.field(default=value, metadata=item.metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentConfig(PretrainConfig):
    """A pretraining run that is over in a minute or two on a laptop, as an experiment has several."""

    steps: int = _default("steps", 400)
    batch_rows: int = _default("batch_rows", 16)
    learning_rate: float = _default("learning_rate", 3e-3)
    log_every: int = _default("log_every", 5)
    eval_every: int = _default("eval_every", 50)
    eval_rows: int = _default("eval_rows", 50)
    sample_every: int = _default("sample_every", 200)
    sample_prompt: str = _default("sample_prompt", "The")
    save_every: int = _default("save_every", 200)
    save_total_limit: int = _default("save_total_limit", 1)
    preset: str = _default("preset", "tiny")
    context: int | None = _default("context", 128)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("experiment", choices=NAMES, help="what is changed")
    parser.add_argument(
        "--out", type=named_folder, default=Path("runs"), metavar="FOLDER", help="where (default: %(default)s)"
    )
    parser.add_argument("--resume", action="store_true", help="go on with what an earlier call has left undone")
    parser.add_argument("--allow-changes", action="store_true", help="resume with other settings or data")
    add_report_to(parser)
    add_json(parser)
    add_settings(parser, ExperimentConfig)
    parser.usage = f"{parser.prog} {{{','.join(NAMES)}}} [OPTION ...]"


def run(args: argparse.Namespace) -> int:
    """Train the variants and compare them."""
    out: Path = args.out / args.experiment
    config = ExperimentConfig.resolve(
        settings_file(args, out / "experiment.toml"), given_settings(args, ExperimentConfig)
    )
    with importing_torch():
        from llamarium.cli.training import watching
        from llamarium.train.experiments import run_experiment
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
        args.experiment,
        config,
        out,
        resume=args.resume,
        allow_changes=args.allow_changes,
        watch=watch,
    )
    if outcome.signal is not None:
        note("saved; go on with --resume")
        return 128 + outcome.signal
    if args.json:
        emit({"event": "report", "path": str(outcome.report)})
    note(f"report: {outcome.report}")
    return 0
