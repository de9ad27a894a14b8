"""Teach a model by preferences (DPO): of two answers to a prompt, the better one
becomes likelier, measured against the model that it was.

The data is JSONL, a line a pair: {"prompt": ..., "chosen": ..., "rejected": ...},
or {"messages": [...], ...} for a dialog that the answers go on from. Only answers
count. --preview shows which tokens those are, and trains nothing.

  llamarium dpo --data pairs.jsonl --preview
  llamarium dpo --data pairs.jsonl --out runs/preferred
  llamarium dpo --data pairs.jsonl --model runs/sft-merged --beta 0.3
"""

import argparse
from typing import TYPE_CHECKING

from llamarium.cli.options import UsageError, add_json, importing_torch
from llamarium.cli.output import show, status
from llamarium.cli.settings import add_run, add_settings, given_settings, settings_file
from llamarium.train.config import DPOConfig

if TYPE_CHECKING:
    from llamarium.train.distributed.process_group import ProcessGroup
    from llamarium.train.setup import Setup


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("-m", dest="model", default=argparse.SUPPRESS, metavar="NAME", help="the same as --model")
    parser.add_argument("--preview", action="store_true", help="show the first row's learned tokens, and leave")
    add_run(parser, "runs/dpo")
    add_json(parser)
    add_settings(parser, DPOConfig)


def run(args: argparse.Namespace) -> int:
    """Train, or preview."""
    if args.preview and args.json:
        raise UsageError("argument --json: not allowed with --preview, which is for people")
    config = DPOConfig.resolve(settings_file(args), given_settings(args, DPOConfig))
    with status("loading PyTorch"), importing_torch():
        from llamarium.cli.training import follow
        from llamarium.train.dpo import prepare
    if args.preview:
        return _preview(config)

    def make(process_group: "ProcessGroup") -> "Setup":
        with status(f"loading {config.model} and the pairs"):
            return prepare(config, process_group)

    return follow(config, args, make)


def _preview(config: DPOConfig) -> int:
    from llamarium.checkpoints.tokenizers import load_tokenizer
    from llamarium.train.data.preview import preview
    from llamarium.train.dpo import read_pair_rows
    from llamarium.train.finetune import check, with_chat_format

    check(config)
    tokenizer = with_chat_format(config, load_tokenizer(config.model))
    show(preview(read_pair_rows(config, tokenizer).batch(0, [0]), tokenizer))
    return 0
