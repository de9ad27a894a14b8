"""Teach a model by preferences (DPO): of two answers to a prompt, the better one
becomes likelier, measured against the model that it was.

The data is JSONL, a line a pair: {"prompt": ..., "chosen": ..., "rejected": ...},
or {"messages": [...], ...} for a dialog that the answers go on from. Only answers
count. --preview shows which tokens those are, and trains nothing.

  llamarium dpo --data pairs.jsonl --preview
  llamarium dpo --data pairs.jsonl --out runs/preferred
  llamarium dpo --data pairs.jsonl --model runs/sft-merged --beta 0.3
"""

from functools import partial

from llamarium.cli.tuning import add_tuning, tune
from llamarium.train.config import DPOConfig

add_arguments = partial(add_tuning, kind=DPOConfig, folder="runs/dpo")
run = partial(tune, kind=DPOConfig, data_name="the pairs")
