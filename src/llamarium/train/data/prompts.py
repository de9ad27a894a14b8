"""Read prompts to be answered and rewarded: one a row of the data, in one of three forms, which may be mixed.

    {"prompt": "17+25=", "answer": "42"}
    {"messages": [..., {"role": "user", "content": "17+25?"}], "answer": "42"}
    {"conversations": [..., {"from": "human", "value": "17+25?"}], "answer": "42"}

Other fields of a row, as "answer" here, are the reward's.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self, cast

import torch

from llamarium.errors import TrainingError, escape, show_value, warn_caller
from llamarium.tokenizer.base import Tokenizer
from llamarium.train.data.batch import AnswerBatch
from llamarium.train.data.dialog_rows import TooLong
from llamarium.train.data.dialogs import messages_of
from llamarium.train.data.sources import at_place, read_rows

_ANSWERED = ("completion", "chosen", "rejected", "instruction", "output")
"""What other kinds of data have: answers, which are not read here."""


class Prompt(NamedTuple):
    """One prompt: its ids, its row's fields, which the reward sees, and its place for messages ("data.jsonl:3")."""

    ids: tuple[int, ...]
    row: Mapping[str, Any]
    place: str

    @property
    def text(self) -> str:
        """What is asked, for people: the prompt, or the last message."""
        return str(self.row["prompt"] if "prompt" in self.row else messages_of(self.row)[-1].get("content"))


class PromptRows:
    """Prompts, each a row of a run's data; its answers are sampled while the run goes on.

    `fingerprint` is the SHA-256, hex, of all lines, their ids and the longest row.
    """

    def __init__(self, prompts: Sequence[Prompt], context: int) -> None:
        self.prompts, self.context = prompts, context
        digest = hashlib.sha256(f"prompts 1 {context}".encode())
        for prompt in prompts:
            digest.update(json.dumps([prompt.ids, prompt.row], sort_keys=True, default=str).encode())
        self.fingerprint = digest.hexdigest()

    @classmethod
    def from_file(
        cls, source: str | Path, tokenizer: Tokenizer, context: int, max_tokens: int, *, too_long: TooLong, chat: bool
    ) -> Self:
        """Read the prompts of a source.

        Args:
            source: See `read_rows`.
            tokenizer: Writes a prompt as a dialog's if it has a dialog format and `chat` is true.
            context: Tokens of a prompt and its answer at most.
            max_tokens: Tokens of an answer at most.
            too_long: What becomes of prompts that leave no room for an answer.
            chat: See `tokenizer`.

        Raises:
            TrainingError: For a source that cannot be read or holds no prompt; for a row that is none, with its place.
        """
        prompts: list[Prompt] = []
        for place, record in read_rows(str(source)):
            with at_place(place):
                prompts.append(Prompt(tuple(_ids(record, tokenizer, chat=chat)), record, place))
        fitting = [prompt for prompt in prompts if 0 < len(prompt.ids) <= context - max_tokens]
        if len(fitting) < len(prompts):
            longest = max(prompts, key=lambda prompt: len(prompt.ids))
            found = (
                f"{escape(source)}: {len(prompts) - len(fitting)} of {len(prompts)} prompts leave no room for an "
                f"answer of {max_tokens} tokens in {context}; the longest, {longest.place}, has {len(longest.ids)}"
            )
            if too_long == "error" or not fitting:
                raise TrainingError(f"{found}; use a longer context, shorter answers, or drop them (--too-long drop)")
            warn_caller(f"{found}; they are left out")
        if not fitting:
            raise TrainingError(f"{escape(source)}: holds no prompt; expected a JSON object on each line, or rows")
        return cls(fitting, context)

    def split(self, validation: float) -> tuple[Self, Self]:
        """Return the first prompts to train on, and the last share of them to validate.

        TrainingError if either would have none.
        """
        count = max(1, round(len(self.prompts) * validation))
        if count >= len(self.prompts):
            raise TrainingError(
                f"a share of {show_value(validation)} of {len(self.prompts)} prompts is {count}; expected at least one "
                "to train on besides: give more prompts, or no validation (--validation 0)"
            )
        return type(self)(self.prompts[:-count], self.context), type(self)(self.prompts[-count:], self.context)

    @property
    def about(self) -> dict[str, int]:
        """Counts, to describe a difference between data sets."""
        return {"prompts": len(self.prompts), "tokens": sum(len(prompt.ids) for prompt in self.prompts)}

    def num_rows(self, epoch: int) -> int:
        """Return the number of prompts; every epoch has the same."""
        return len(self.prompts)

    def batch(self, epoch: int, indices: Sequence[int]) -> AnswerBatch:
        """Return rows of the shape that answers have, to time a step; they hold no prompt."""
        ids_BT = torch.zeros((len(indices), self.context), dtype=torch.int64)
        positions_BT, zeros_N = torch.arange(self.context).expand_as(ids_BT), torch.zeros(ids_BT.numel())
        return AnswerBatch(ids_BT, ids_BT, positions_BT, None, advantages_N=zeros_N, sampled_N=zeros_N)


def _ids(record: Mapping[str, Any], tokenizer: Tokenizer, *, chat: bool) -> list[int]:
    forms = [name for name in ("prompt", "messages", "conversations") if name in record]
    others = [name for name in _ANSWERED if name in record]
    if len(forms) != 1 or others:
        raise TrainingError(
            f"has the keys {show_value(list(record))}; expected one of prompt, messages and conversations, "
            "and what the reward reads"
        )
    if forms != ["prompt"]:
        if tokenizer.chat_format is None or not chat:
            raise TrainingError(f"is a dialog, and {tokenizer.source} has no dialog format; write prompts instead")
        return tokenizer.chat_format.encode(_messages(messages_of(record)))
    prompt = record["prompt"]
    if not isinstance(prompt, str):
        raise TrainingError(f"prompt is {show_value(prompt)}; expected text")
    if tokenizer.chat_format is None or not chat:
        return tokenizer.encode(prompt)
    return tokenizer.chat_format.encode([{"role": "user", "content": prompt}])


def _messages(value: object) -> list[Any]:
    messages = cast("list[Any]", value) if isinstance(value, list) else []
    last = messages[-1] if messages else None
    if not isinstance(last, dict) or cast("dict[str, Any]", last).get("role") == "assistant":
        raise TrainingError(f"messages is {show_value(value)}; expected a list that ends with what is to be answered")
    return messages
