"""Teach a model by examples: LoRA adapters beside the frozen base, QLoRA with
--quantize nf4, or all weights with --method full.

The data is a .jsonl or .parquet file, a folder of them, or org/name on the hub.
A row is an example: {"messages": [...]}, {"conversations": [...]}, {"prompt":
..., "completion": ...}, {"instruction": ..., "output": ...} or {"text": ...}.
What the assistant says is learned, and of a text all; --preview shows which
tokens those are, and trains nothing.

  llamarium finetune --data examples.jsonl --preview
  llamarium finetune --data examples.jsonl --out runs/mine --steps 100
  llamarium merge --adapter runs/mine/best --out my-model
"""

import argparse

from llamarium.cli.tuning import add_tuning, tune
from llamarium.train.config import FinetuneConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_tuning(parser, FinetuneConfig, "runs/finetune")


def run(args: argparse.Namespace) -> int:
    """Fine-tune, or preview."""
    return tune(args, FinetuneConfig, "the examples")
