"""Read pairs of answers for preference training: one chosen, one rejected.

A row of the data (see `data/sources.py`) is one pair, in one of three forms, which may be mixed:

    {"prompt": "2+2?", "chosen": "4", "rejected": "5"}
    {"messages": [..., {"role": "user", "content": "2+2?"}], "chosen": "4", "rejected": "5"}
    {"conversations": [..., {"from": "human", "value": "2+2?"}], "chosen": "4", "rejected": "5"}

Each becomes two examples with the same prompt, of which only the answer and its end count. Both lie in the same row,
so that no batch has half a pair.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llamarium.errors import TrainingError, show_value
from llamarium.tokenizer.base import Tokenizer
from llamarium.train.data.batch import TrainingBatch
from llamarium.train.data.dialog_rows import DialogRows
from llamarium.train.data.dialogs import QUESTIONS, Example, question_of, read_dialogs, refuse_keys

_ANSWERS = ("chosen", "rejected")
_OTHER_FORMS = ("completion", "instruction", "input", "output")


def read_pairs(source: str | Path, tokenizer: Tokenizer, *, chat: bool = True) -> list[Example]:
    """Read the pairs of a source: two examples of each row, the chosen one first.

    Arguments and errors are those of `read_dialogs`.
    """
    return read_dialogs(source, tokenizer, chat=chat, expand=_expand, finish=_finish)


def _expand(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the two records of a pair for `read_dialogs`."""
    prompts = [name for name in QUESTIONS if name in record]
    if len(prompts) != 1 or not all(name in record for name in _ANSWERS):
        raise TrainingError(
            f"has the keys {show_value(list(record))}; expected chosen and rejected, and one of prompt, "
            "messages and conversations"
        )
    refuse_keys(record, _OTHER_FORMS)
    answers = [record[name] for name in _ANSWERS]
    for name, answer in zip(_ANSWERS, answers, strict=True):
        if not isinstance(answer, str):
            raise TrainingError(f"{name} is {show_value(answer)}; expected the answer's text")
    rest = {name: value for name, value in record.items() if name not in (*_ANSWERS, *prompts)}
    if prompts == ["prompt"]:
        return [{**rest, "prompt": record["prompt"], "completion": answer} for answer in answers]
    messages = question_of(record)
    return [{**rest, "messages": [*messages, {"role": "assistant", "content": answer}]} for answer in answers]


def _finish(pair: list[Example]) -> list[Example]:
    chosen, rejected = pair
    if np.array_equal(chosen.ids, rejected.ids):
        raise TrainingError("chosen and rejected are the same tokens, of which neither can be preferred")
    if chosen.ids[0] != rejected.ids[0]:
        raise TrainingError(
            "nothing stands before the answers, whose first tokens cannot be learned then; write a prompt"
        )
    return [_last_answer(example) for example in pair]


def _last_answer(example: Example) -> Example:
    """Mark only the last answer as learned; earlier ones are the same on both sides."""
    unlearned = np.flatnonzero(~example.learned)
    last = int(np.flatnonzero(example.learned)[-1])
    learned = np.zeros_like(example.learned)
    learned[unlearned[unlearned < last][-1] + 1 : last + 1] = True
    return example._replace(learned=learned)


class PairRows(DialogRows):
    """Pairs packed into rows, in another order every epoch; `reference_E` is each answer's reference log P."""

    together = 2
    _read = staticmethod(read_pairs)
    _label = "pair rows 1"
    reference_E: Tensor | None = None

    def batch(self, epoch: int, indices: Sequence[int]) -> TrainingBatch:
        """Return rows of an epoch; the same arguments give the same tensors."""
        batch = super().batch(epoch, indices)
        if self.reference_E is None:
            return batch
        return replace(batch, reference_E=self.reference_E[torch.tensor(self.examples_of(epoch, indices))])

    def examples_of(self, epoch: int, indices: Sequence[int]) -> list[int]:
        """Return the numbers of the examples in these rows, in row order."""
        rows = self._rows(epoch)
        return [number for index in indices for number in rows[index]]
