"""Teach a model by examples: LoRA adapters beside the frozen base, QLoRA with
--quantize nf4, or all weights with --method full.

The data is JSONL, a line an example: {"messages": [...]}, {"prompt": ...,
"completion": ...} or {"instruction": ..., "output": ...}. What the assistant
says is learned; --preview shows which tokens those are, and trains nothing.

  llamarium finetune --data examples.jsonl --preview
  llamarium finetune --data examples.jsonl --out runs/mine --steps 100
  llamarium merge --adapter runs/mine/best --out my-model
"""

import argparse
from typing import TYPE_CHECKING

from llamarium.cli.options import UsageError, add_json, importing_torch
from llamarium.cli.output import show, status
from llamarium.cli.settings import add_run, add_settings, given_settings, settings_file
from llamarium.train.config import FinetuneConfig

if TYPE_CHECKING:
    from llamarium.train.distributed.process_group import ProcessGroup
    from llamarium.train.setup import Setup


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("-m", dest="model", default=argparse.SUPPRESS, metavar="NAME", help="the same as --model")
    parser.add_argument("--preview", action="store_true", help="show the first row's learned tokens, and leave")
    add_run(parser, "runs/finetune")
    add_json(parser)
    add_settings(parser, FinetuneConfig)


def run(args: argparse.Namespace) -> int:
    """Fine-tune, or preview."""
    if args.preview and args.json:
        raise UsageError("argument --json: not allowed with --preview, which is for people")
    config = FinetuneConfig.resolve(settings_file(args), given_settings(args, FinetuneConfig))
    with status("loading PyTorch"), importing_torch():
        from llamarium.cli.training import follow
        from llamarium.train.finetune import prepare
    if args.preview:
        return _preview(config)

    def make(process_group: "ProcessGroup") -> "Setup":
        with status(f"loading {config.model} and the examples"):
            return prepare(config, process_group)

    return follow(config, args, make)


def _preview(config: FinetuneConfig) -> int:
    from llamarium.checkpoints.tokenizers import load_tokenizer
    from llamarium.train.data.preview import preview
    from llamarium.train.finetune import check, read_rows, with_chat_format

    check(config)
    tokenizer = with_chat_format(config, load_tokenizer(config.model))
    show(preview(read_rows(config, tokenizer).batch(0, [0]), tokenizer))
    return 0
