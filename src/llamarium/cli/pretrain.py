"""Train a model from scratch, on a text file, a folder, or what Python brings;
with -m go on from a model: its weights, shape and tokenizer.

A run lives in one folder: its settings, metrics.jsonl, and checkpoints that
are Hugging Face folders; `best` points at the one with the lowest validation
loss. Ctrl-C or SIGTERM saves and ends; --resume goes on to the very same end.

  llamarium pretrain --steps 200
  llamarium pretrain --data story.txt --preset tiny --out runs/story
  llamarium pretrain --config runs/story/train.toml --out runs/story --resume
  llamarium generate -m runs/story/best "Once upon"
  llamarium pretrain -m smollm2-135m --data novels/=3,shakespeare=1 --context 512
"""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from llamarium.cli.options import add_json, importing_torch
from llamarium.cli.output import progress, status
from llamarium.cli.settings import add_model, add_run, add_settings, given_settings, settings_file
from llamarium.hub.folders import is_adapter
from llamarium.hub.resolve import resolve
from llamarium.presets import preset
from llamarium.train.config import PretrainConfig

if TYPE_CHECKING:
    from llamarium.train.distributed.process_group import ProcessGroup
    from llamarium.train.setup import Setup


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_model(parser)
    add_run(parser, "runs/pretrain")
    add_json(parser)
    add_settings(parser, PretrainConfig)


def run(args: argparse.Namespace) -> int:
    """Train."""
    config = PretrainConfig.resolve(settings_file(args), given_settings(args, PretrainConfig))
    if config.preset:
        preset(config.preset)  # a wrong name is reported before a folder that holds a run
    if config.model and not is_adapter(Path(os.path.expanduser(config.model))):  # noqa: PTH111
        resolve(config.model)  # a missing model is reported before PyTorch is imported, which takes seconds
    with status("loading PyTorch"), importing_torch():
        from llamarium.cli.training import follow
        from llamarium.train.pretrain import prepare

    def make(process_group: "ProcessGroup") -> "Setup":
        with progress("preparing the data") as report:
            return prepare(config, args.out.absolute(), report if process_group.is_rank_zero else None, process_group)

    return follow(config, args, make)
