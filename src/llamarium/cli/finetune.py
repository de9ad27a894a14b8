"""Teach a model by examples: LoRA adapters beside the frozen base, QLoRA with
--quantize nf4, or all weights with --method full.

The data is a .jsonl, .json, .csv, .tsv or .parquet file, a folder of them, or
org/name on the hub.
A row is an example: {"messages": [...]}, {"conversations": [...]}, {"prompt":
..., "completion": ...}, {"instruction": ..., "output": ...} or {"text": ...}.
What the assistant says is learned, and of a text all; --preview shows which
tokens those are, and trains nothing.

  llamarium finetune --data examples.jsonl --preview
  llamarium finetune --data examples.jsonl --out runs/mine --steps 100
  llamarium merge --adapter runs/mine/best --out my-model
"""

from functools import partial

from llamarium.cli.tuning import add_tuning, tune
from llamarium.train.config import FinetuneConfig

add_arguments = partial(add_tuning, kind=FinetuneConfig, folder="runs/finetune")
run = partial(tune, kind=FinetuneConfig, data_name="the examples")
