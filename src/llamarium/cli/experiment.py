"""Train the same model with one thing changed, and compare the runs.

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
The runs are in OUT/EXPERIMENT/VARIANT; `inspect` shows their curves.
Ctrl-C saves and ends; --resume goes on, and does not repeat what is done.

  llamarium experiment rope
  llamarium experiment heads --data story.txt --steps 1000 --seeds 3
  llamarium experiment tied --embedding-std 1
  llamarium experiment ngrams --data shakespeare --steps 2000
  llamarium experiment causal --out runs --resume
  llamarium inspect --checkpoints runs/causal
"""

import argparse
import shlex
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from llamarium.cli.options import add_json, importing_torch, named_folder
from llamarium.cli.output import WIDTH, emit, filled, note, quote, say, show, table
from llamarium.cli.settings import add_report_to, add_settings, given_settings, settings_file
from llamarium.cli.threads import set_threads
from llamarium.train.config import ExperimentConfig

if TYPE_CHECKING:
    from llamarium.train.experiments.running import Outcome
    from llamarium.train.journal import Emit

_SAMPLE = 120  # characters shown of a sample

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
        from llamarium.train.trackers import trackers

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
        emit({"event": "result", "arms": arms, "notes": outcome.notes, "verdict": outcome.verdict})
    else:
        _print(args.experiment, outcome)
    note(f"curves and samples: llamarium inspect --checkpoints {shlex.quote(str(args.out / args.experiment))}")
    return 0


def _print(name: str, outcome: "Outcome") -> None:
    """Print the results as tables of up to 80 columns, and what to look for in them."""
    from llamarium.train.experiments.variants import EXPERIMENTS
    from llamarium.train.experiments.verdict import spread_of

    say(f"{EXPERIMENTS[name].title}\n")
    heads = ("parameters", "validation\nloss", "training\nloss", "KV bytes\nper token", "tokens/s")
    rows = (
        (
            label,
            f"{arm.parameters:,}",
            spread_of(arm.losses) if arm.losses else "-",
            _number(arm.training_loss, ".4f"),
            _number(arm.kv_bytes, ","),
            _number(arm.tokens_per_s, ",.0f"),
        )
        for label, arm in outcome.arms.items()
    )
    show(table("", *heads, right=heads, rows=rows))
    measures = list(dict.fromkeys(name for arm in outcome.arms.values() for name in arm.measures))
    if measures:
        rows = ((k, *(_number(arm.measures.get(m), ".4g") for m in measures)) for k, arm in outcome.arms.items())
        say("")
        show(table("", *measures, right=measures, rows=rows))
    if any(arm.sample for arm in outcome.arms.values()):
        say("")
        show(table("", "sample at the end", rows=((k, quote(arm.sample[:_SAMPLE])) for k, arm in outcome.arms.items())))
    if len(next(iter(outcome.arms.values())).losses) > 1:
        say("\nValidation loss: mean ± standard deviation. The rest is the first seed's.")
    for paragraph in filter(None, (*outcome.notes, outcome.verdict)):
        say(f"\n{filled(paragraph, WIDTH)}")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
