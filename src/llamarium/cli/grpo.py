"""Teach a model by rewards (GRPO): it answers each prompt several times, a
function says what each answer is worth, and better ones become likelier.

The data is JSONL, a line a prompt: {"prompt": ...} or {"messages": [...]},
with what the reward reads beside it, "answer", say. --preview shows the first
prompt as the model reads it, and trains nothing. Rewards:

  exact                  1 where the answer is the line's "answer"
  regex:PATTERN          1 where the pattern matches the whole answer
  schema:FILE.json       1 where the answer is JSON that the schema accepts
  length:N               1 at N characters, falling to 0 at none and at 2 N
  FILE.py:NAME           your own: NAME(answer: str, row: dict) -> float

Several --reward are added up, with --reward-weights (1 each by default).

  llamarium grpo --data sums.jsonl --reward exact --out runs/sums
  llamarium grpo --data prompts.jsonl --reward rewards.py:polite -m runs/sft
  llamarium grpo --data sums.jsonl --reward exact --reward length:2
"""

from functools import partial

from llamarium.cli.tuning import add_tuning, tune
from llamarium.train.config import GRPOConfig

add_arguments = partial(add_tuning, kind=GRPOConfig, folder="runs/grpo")
run = partial(tune, kind=GRPOConfig, data_name="the prompts")
