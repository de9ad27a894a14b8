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

from llamarium.cli.tuning import add_tuning, tune
from llamarium.train.config import DPOConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_tuning(parser, DPOConfig, "runs/dpo")


def run(args: argparse.Namespace) -> int:
    """Train, or preview."""
    return tune(args, DPOConfig, "the pairs")
