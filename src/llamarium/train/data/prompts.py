"""Read prompts to be answered and rewarded: one a row of the data (see `datasets/forms.py`).

    {"prompt": "17+25=", "answer": "42"}

Other fields of a row, as "answer" here, are the reward's.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from llamarium.datasets.rows import Reading, Tally
from llamarium.datasets.sources import read_rows_in_order
from llamarium.errors import TrainingError, counted, escape, warn_caller
from llamarium.tokenizer.base import Tokenizer
from llamarium.train.data.batch import AnswerBatch
from llamarium.train.data.dialog_rows import Truncate
from llamarium.train.data.dialogs import ROWS_AT_ONCE, encoded_prompts
from llamarium.train.data.mixture import Mixture


class Prompt(NamedTuple):
    """One prompt: its ids, its row's fields, which the reward sees, and its place for messages ("data.jsonl:3").

    `text` is what is asked, for people: the prompt, or the last message.
    """

    ids: tuple[int, ...]
    row: Mapping[str, Any]
    place: str
    text: str


class PromptRows:
    """Prompts, each a row of a run's data; its answers are sampled while the run goes on.

    `fingerprint` is the SHA-256, hex, of all lines, their ids and the longest row.
    """

    def __init__(self, prompts: Sequence[Prompt], context: int, mixture: Mixture | None = None) -> None:
        self.prompts, self.context = prompts, context
        self.mixture = mixture or Mixture({"": 1.0}, [len(prompts)], None)
        digest = hashlib.sha256(f"prompts 1 {context}{self.mixture.label}".encode())
        for prompt in prompts:
            digest.update(json.dumps([prompt.ids, prompt.row], sort_keys=True, default=str).encode())
        self.fingerprint = digest.hexdigest()

    @classmethod
    def from_file(
        cls,
        source: str | Path | Mapping[str, float],
        tokenizer: Tokenizer,
        context: int,
        max_tokens: int,
        *,
        truncate: Truncate,
        chat: bool,
        seed: int = 0,
        reading: Reading | None = None,
    ) -> Self:
        """Read the prompts of a source, or of several with weights, which `seed` draws from.

        A prompt is written as a dialog's if the tokenizer has a dialog format and `chat` is true. Prompt and answer
        have `context` tokens at most, an answer `max_tokens`; `truncate` is what becomes of prompts without that room.
        TrainingError for a source that cannot be read or holds no prompt; for a row that is none, with its place.
        """
        if truncate == "keep-start":
            raise TrainingError("truncate is keep-start, which would cut what is asked; expected error, drop, keep-end")
        weights = source if isinstance(source, Mapping) else {str(source): 1.0}
        how: Any = {"truncate": truncate, "chat": chat, "reading": reading or Reading()}
        parts = [_read(name, tokenizer, context, max_tokens, **how) for name in weights]
        mixture = Mixture(weights, [len(part) for part in parts], seed) if len(parts) > 1 else None
        return cls([prompt for part in parts for prompt in part], context, mixture)

    def split(self, validation: float) -> tuple[Self, Self]:
        """Return the first prompts to train on, and the last share of them to validate.

        TrainingError if either would have none.
        """
        train, held = self.mixture.split(validation)
        make = [type(self)([self.prompts[i] for i in units], self.context, mixture) for units, mixture in (train, held)]
        return make[0], make[1]

    @property
    def about(self) -> dict[str, Any]:
        """Counts, of each source, too, to describe the data and a difference between data sets."""
        tokens = self.mixture.sums([len(prompt.ids) for prompt in self.prompts])
        return {"prompts": len(self.prompts), "tokens": sum(tokens), **self.mixture.about(tokens)}

    def num_rows(self, epoch: int) -> int:
        """Return the number of prompts; every epoch has the same."""
        return sum(self.mixture.counts)

    def prompt(self, epoch: int, index: int) -> Prompt:
        """Return a prompt of an epoch."""
        return self.prompts[int(self.mixture.units(epoch)[index])]

    def batch(self, epoch: int, indices: Sequence[int]) -> AnswerBatch:
        """Return rows of the shape that answers have, to time a step; they hold no prompt."""
        ids_BT = torch.zeros((len(indices), self.context), dtype=torch.int64)
        positions_BT, zeros_N = torch.arange(self.context).expand_as(ids_BT), torch.zeros(ids_BT.numel())
        return AnswerBatch(ids_BT, ids_BT, positions_BT, None, advantages_N=zeros_N, sampled_N=zeros_N)


def _read(
    name: str,
    tokenizer: Tokenizer,
    context: int,
    max_tokens: int,
    *,
    truncate: Truncate,
    chat: bool,
    reading: Reading,
) -> list[Prompt]:
    """Read the prompts of one source; arguments and errors as `PromptRows.from_file`."""
    tally, prompts = Tally(escape(name), reading), list[Prompt]()
    rows = read_rows_in_order(name, tally)
    while chunk := [*islice(rows, ROWS_AT_ONCE)]:
        for row, record, ids in encoded_prompts(chunk, tokenizer, tally, chat=chat):
            prompts.append(Prompt(tuple(ids), row.fields, row.place, str(record.messages[-1].get("content"))))
    room = context - max_tokens
    fitting = [prompt for prompt in prompts if len(prompt.ids) <= room]
    if len(fitting) < len(prompts):
        longest, num_long = max(prompts, key=lambda prompt: len(prompt.ids)), len(prompts) - len(fitting)
        found = (
            f"{escape(name)}: {num_long} of {counted(len(prompts), 'prompt')} {'leaves' if num_long == 1 else 'leave'} "
            "no room for an answer of "
            f"{counted(max_tokens, 'token')} in {context}; the longest, {longest.place}, has {len(longest.ids)}"
        )
        if truncate == "keep-end":
            warn_caller(f"{found}; they lose their beginning")
            fitting = [prompt._replace(ids=prompt.ids[-room:]) for prompt in prompts]
        elif truncate != "drop" or not fitting:
            raise TrainingError(
                f"{found}; use a longer context, shorter answers, or cut or drop them (--truncate keep-end, drop)"
            )
        else:
            warn_caller(f"{found}; they are left out")
    if not fitting:
        raise TrainingError(f"{escape(name)}: holds no prompt{tally.why_none}")
    tally.warn()
    return fitting
