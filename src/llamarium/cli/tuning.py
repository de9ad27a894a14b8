"""What `finetune`, `dpo` and `grpo` share: their options, the run and the preview. Imports torch only when it runs."""

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from llamarium.cli.options import UsageError, add_json, importing_torch
from llamarium.cli.output import show, status
from llamarium.cli.settings import add_model, add_run, add_settings, given_settings, settings_file
from llamarium.hub.resolve import resolve
from llamarium.train.config import FinetuneConfig

if TYPE_CHECKING:
    from rich.text import Text

    from llamarium.tokenizer.base import Tokenizer
    from llamarium.train.distributed.process_group import ProcessGroup
    from llamarium.train.setup import Setup

_Config = TypeVar("_Config", bound=FinetuneConfig)

Tuning = tuple[Callable[[_Config, "ProcessGroup"], "Setup"], Callable[[_Config, "Tokenizer"], "Text"]]
"""What makes a run, and what shows the first row of its data."""


def add_tuning(parser: argparse.ArgumentParser, kind: type[FinetuneConfig], folder: str) -> None:
    """Add the options of a run that begins with a model, by default in `folder`."""
    add_model(parser)
    parser.add_argument(
        "--preview", action="store_true", help="show the first row of the data as the model reads it, and leave"
    )
    add_run(parser, folder)
    add_json(parser)
    add_settings(parser, kind)


def tune(
    args: argparse.Namespace, kind: type[_Config], data_name: str, import_run: Callable[[], Tuning[_Config]]
) -> int:
    """Train, or preview, and return the exit code; `import_run` imports what makes the run."""
    if args.preview and args.json:
        raise UsageError("argument --json: not allowed with --preview, which is for people")
    config = kind.resolve(settings_file(args), given_settings(args, kind))
    if config.data and not args.preview:
        resolve(config.model)  # a missing model is reported before PyTorch is imported, which takes seconds
    with status("loading PyTorch"), importing_torch():
        from llamarium.cli.training import follow

        prepare, first_row = import_run()
    if args.preview:
        return _preview(config, first_row)

    def make(process_group: "ProcessGroup") -> "Setup":
        with status(f"loading {config.model} and {data_name}"):
            return prepare(config, process_group)

    return follow(config, args, make)


def _preview(config: _Config, first_row: "Callable[[_Config, Tokenizer], Text]") -> int:
    from llamarium.checkpoints.tokenizers import load_tokenizer
    from llamarium.train.finetune import check, with_chat_format

    check(config)
    show(first_row(config, with_chat_format(config, load_tokenizer(config.model))))
    return 0
