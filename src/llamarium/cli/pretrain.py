"""Train a model from scratch, on a text file, a folder, or what Python brings.

A run lives in one folder: its settings, metrics.jsonl, and checkpoints that
are Hugging Face folders; `best` points at the one with the lowest validation
loss. Ctrl-C or SIGTERM saves and ends; --resume goes on to the very same end.

  llamarium pretrain --steps 200
  llamarium pretrain --data story.txt --preset tiny --out runs/story
  llamarium pretrain --config runs/story/train.toml --out runs/story --resume
  llamarium generate -m runs/story/best "Once upon"
"""

import argparse
from pathlib import Path

from llamarium.cli.options import add_json, interrupts_held
from llamarium.cli.settings import add_settings, given_settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--out", type=Path, default=Path("runs/pretrain"), metavar="FOLDER",
                        help="the run's folder (default: %(default)s)")  # fmt: skip
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint, or begin")
    parser.add_argument("--allow-changes", action="store_true", help="resume with other settings or data")
    parser.add_argument("--report", action="store_true", help="write report.html into the run's folder at the end")
    add_json(parser)
    add_settings(parser)


def run(args: argparse.Namespace) -> int:
    """Train."""
    from llamarium.train.config import TrainConfig

    config = TrainConfig.resolve(args.config, given_settings(args))
    with interrupts_held():
        from llamarium.cli.training import follow
        from llamarium.train.pretrain import prepare

    return follow(config, args, prepare)
