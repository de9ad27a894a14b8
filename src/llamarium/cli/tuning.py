"""What `finetune`, `dpo` and `grpo` share: their options, the run and the preview. Imports torch only when it runs."""

import argparse
from typing import TYPE_CHECKING

from llamarium.cli.options import UsageError, add_json, importing_torch
from llamarium.cli.output import show, status
from llamarium.cli.settings import add_model, add_run, add_settings, given_settings, settings_file
from llamarium.hub.resolve import resolve
from llamarium.train.config import FinetuneConfig

if TYPE_CHECKING:
    from llamarium.train.distributed.process_group import ProcessGroup
    from llamarium.train.setup import Setup


def add_tuning(parser: argparse.ArgumentParser, kind: type[FinetuneConfig], folder: str) -> None:
    """Add the options of a run that begins with a model, by default in `folder`."""
    add_model(parser)
    text = "show the first training row, in which examples may be packed in another order, and exit"
    parser.add_argument("--preview", action="store_true", help=text)
    add_run(parser, folder)
    add_json(parser)
    add_settings(parser, kind)


def tune(args: argparse.Namespace, kind: type[FinetuneConfig], data_name: str) -> int:
    """Train, or preview, and return the exit code."""
    if args.preview and args.json:
        raise UsageError("argument --json: not allowed with --preview, which is for people")
    config = kind.resolve(settings_file(args), given_settings(args, kind))
    if config.data and not args.preview:
        resolve(config.model)  # a missing model is reported before PyTorch is imported, which takes seconds
    with status("loading PyTorch"), importing_torch():
        from llamarium.cli.training import follow
        from llamarium.train.functions import tuning_of
    if args.preview:
        show(tuning_of(kind).first_row(config))
        return 0

    def make(process_group: "ProcessGroup") -> "Setup":
        with status(f"loading {config.model} and {data_name}"):
            return tuning_of(kind).prepare(config, process_group)

    return follow(config, args, make)
