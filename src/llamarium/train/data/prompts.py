"""Read prompts for GRPO: one per row of the data (see `datasets/forms.py`).

    {"prompt": "17+25=", "answer": "42"}

Other fields of a row, such as "answer" here, are passed to the reward function.
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
    """A prompt.

    Attributes:
        ids: Token ids.
        row: Fields of the row, for the reward function.
        place: The row's place for messages, e.g. "data.jsonl:3".
        text: The prompt or the last message, for display.
    """

    ids: tuple[int, ...]
    row: Mapping[str, Any]
    place: str
    text: str


class PromptRows:
    """The prompts of a run, one per row of the data; answers are sampled during training.

    `fingerprint` is the SHA-256, hex, of all rows, their ids and `context`.
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
        """Read the prompts of a source, or of several with weights.

        A prompt is written in the tokenizer's dialog format if it has one and `chat` is true. Prompt and answer have up
        to `context` tokens, the answer up to `max_tokens`; `truncate` is the handling of longer prompts. `seed`
        determines the order of several sources. TrainingError if a source cannot be read or has no prompt, or if a row
        is not a prompt, with its place.
        """
        if truncate == "keep-start":
            raise TrainingError("truncate is keep-start, which would cut what is asked; expected error, drop, keep-end")
        weights = source if isinstance(source, Mapping) else {str(source): 1.0}
        options: Any = {"truncate": truncate, "chat": chat, "reading": reading or Reading()}
        parts = [_read(name, tokenizer, context, max_tokens, **options) for name in weights]
        mixture = Mixture(weights, [len(part) for part in parts], seed) if len(parts) > 1 else None
        return cls([prompt for part in parts for prompt in part], context, mixture)

    def split(self, validation: float) -> tuple[Self, Self]:
        """Return the prompts for training, and the last share for validation; TrainingError if either is empty."""
        train, held = self.mixture.split(validation)
        make = [type(self)([self.prompts[i] for i in units], self.context, mixture) for units, mixture in (train, held)]
        return make[0], make[1]

    @property
    def about(self) -> dict[str, Any]:
        """Counts of prompts, tokens and sources, used to describe differences between data sets."""
        tokens = self.mixture.sums([len(prompt.ids) for prompt in self.prompts])
        return {"prompts": len(self.prompts), "tokens": sum(tokens), **self.mixture.about(tokens)}

    def num_rows(self, epoch: int) -> int:
        """Return the number of prompts in an epoch, the same for every epoch."""
        return sum(self.mixture.counts)

    def prompt(self, epoch: int, index: int) -> Prompt:
        """Return a prompt of an epoch."""
        return self.prompts[int(self.mixture.units(epoch)[index])]

    def batch(self, epoch: int, indices: Sequence[int]) -> AnswerBatch:
        """Return dummy rows in the shape of answers, to time a step."""
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
