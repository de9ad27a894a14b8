"""Encode the examples of a data set: an answer's tokens are learned, all others are context.

`datasets/forms.py` says which rows are examples. Learned are an answer's tokens and the one that ends it, so that a
model learns to stop; of a text all, as documents are learned in pretraining, with what begins and ends them.

Rows are read and encoded some hundreds at a time, so what stays in memory are ids: 5 bytes a token, 9 with weights.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamarium.datasets.forms import Plain, Record, Understand, example_of, prompt_of
from llamarium.datasets.messages import other_keys
from llamarium.datasets.rows import BadRow, Reading, Row, Tally
from llamarium.datasets.sources import document_ids, read_rows_in_order
from llamarium.errors import LlamariumError, TrainingError, escape
from llamarium.tokenizer.base import Tokenizer
from llamarium.tokenizer.chat.format import ChatFormat, value_of
from llamarium.train.data.answer_weights import WeightedPart, answer_weights, weighted_dialogs

ROWS_AT_ONCE = 400
"""Rows that are encoded together: a chat template is a process."""

# Source: tatsu-lab/stanford_alpaca, `train.py`, PROMPT_DICT.
_ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:"
)
_ALPACA_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
)


class Understood(NamedTuple):
    """A row, and the records that it holds."""

    row: Row
    records: Sequence[Record]


class Example(NamedTuple):
    """One example: ids, int32 (n,), and which are learned, bool (n,); never the first, as nothing precedes it.

    `form` is the first field of the row's form. `weights`, float32 (n,), multiply the learned tokens' losses; None is 1
    for all. `place` is the row's ("data.jsonl:3"), for messages.
    """

    ids: NDArray[np.int32]
    learned: NDArray[np.bool_]
    form: str = ""
    weights: NDArray[np.float32] | None = None
    place: str = ""


def read_dialogs(
    source: str | Path,
    tokenizer: Tokenizer,
    *,
    chat: bool = True,
    reading: Reading | None = None,
    understand: Understand = example_of,
    finish: Callable[[list[Example]], list[Example]] = list,
    tally: Tally | None = None,
) -> list[Example]:
    """Read the examples of a source: see `datasets/forms.py` for the rows that are examples.

    Prompts and instructions become dialogs of two messages if the tokenizer has a dialog format and `chat` is true.
    Without one (a base model) the answer follows the prompt directly, and an instruction uses Alpaca's template.

    `understand` turns a row's fields into records, `finish` selects or checks a row's examples. `tally` counts the
    rows, with its own `reading`; without one, what is not read or skipped is named in a warning.
    TrainingError for a source that cannot be read or holds no example; for a row that is no example, or has nothing to
    learn, with its place.
    """
    counts = tally or Tally(escape(source), reading or Reading())
    examples: list[Example] = []
    rows = read_rows_in_order(str(source), counts)
    while chunk := [*islice(rows, ROWS_AT_ONCE)]:
        for row, records, encoded in encoded_rows(chunk, tokenizer, counts, chat=chat, understand=understand):
            with counts.at(row.place):
                found = [joined(record.form, parts) for record, parts in zip(records, encoded, strict=True)]
                examples += [example._replace(place=row.place) for example in finish(found)]
    if not examples:
        raise TrainingError(f"{escape(source)}: holds no example{counts.why_none}")
    if tally is None:
        counts.warn()
    return examples


def encoded_rows(
    rows: Sequence[Row | BadRow], tokenizer: Tokenizer, tally: Tally, *, chat: bool, understand: Understand
) -> Iterator[tuple[Row, Sequence[Record], list[list[WeightedPart]]]]:
    """Yield rows with their records and the parts of these; rows that cannot be encoded are `tally`'s."""
    form = tokenizer.chat_format if chat else None
    understood = understood_rows(rows, form, tally, understand)

    # All dialogs at once, as a chat template is a process.
    dialogs = [record for _, records in _usable(understood) for record in records if _is_dialog(record, form)]
    parts_of = iter(()) if form is None else weighted_dialogs(form, dialogs)
    for row, records in _usable(understood, tally):
        found = [next(parts_of) if _is_dialog(record, form) else None for record in records]
        encoded: list[list[WeightedPart]] = []
        with tally.at(row.place):
            for record, parts in zip(records, found, strict=True):
                encoded.append(_continuation(record, tokenizer) if parts is None else value_of(parts))
        if len(encoded) == len(records):
            yield row, records, encoded


def encoded_prompts(
    rows: Sequence[Row | BadRow], tokenizer: Tokenizer, tally: Tally, *, chat: bool
) -> Iterator[tuple[Row, Record, list[int]]]:
    """Yield rows that are prompts, with their records and ids; rows that cannot be encoded are `tally`'s."""
    form = tokenizer.chat_format if chat else None
    understood = understood_rows(rows, form, tally, prompt_of)
    dialogs = [record.dialog for _, records in _usable(understood) for record in records]
    encoded = iter(()) if form is None else form.prompts_of(dialogs)
    for row, records in _usable(understood, tally):
        (record,), ids = records, list[int]()
        with tally.at(row.place):
            found = next(encoded) if form is not None else tokenizer.encode(_plain_prompt(record, tokenizer))
            ids = value_of(found)
            if not ids:
                raise TrainingError("its prompt has no tokens, so there is nothing to answer; write a prompt")
        if ids:
            yield row, record, ids


def understood_rows(
    rows: Sequence[Row | BadRow], form: ChatFormat | None, tally: Tally, understand: Understand
) -> list[Understood | BadRow]:
    """Return rows with their records, without what a dialog format does not read, which `tally` counts.

    A row that is none stands in its place as a bad one, so that errors come in the order of the rows.
    """
    found: list[Understood | BadRow] = []
    for row in rows:
        if isinstance(row, BadRow):
            found.append(row)
            continue
        try:
            records = [_fitting_keys(record, form) for record in understand(row.fields, tally.reading)]
        except LlamariumError as error:
            found.append(BadRow(row.place, str(error)))
            continue
        tally.unread.update({name for record in records for name in record.unread})
        found.append(Understood(row, records))
    return found


def _usable(rows: Sequence[Understood | BadRow], tally: Tally | None = None) -> Iterator[Understood]:
    """Yield the rows that are understood; `tally` counts the others."""
    for row in rows:
        if isinstance(row, Understood):
            yield row
        elif tally is not None:
            tally.skip(row)


def _is_dialog(record: Record, form: ChatFormat | None) -> bool:
    return form is not None and record.text is None


def _fitting_keys(record: Record, form: ChatFormat | None) -> Record:
    """Take keys of messages, and variables, that the format does not read out of a dialog."""
    if form is None:
        return record
    others = other_keys(record.messages, form.message_keys)
    unknown = record.variables.keys() - form.variables
    if not others and not unknown:
        return record
    kept = [{key: value for key, value in message.items() if key not in others} for message in record.messages]
    variables = {name: value for name, value in record.variables.items() if name not in unknown}
    names = (*(f"messages.{key}" for key in others), *(f"chat_template_kwargs.{name}" for name in unknown))
    return replace(record, messages=kept, variables=variables, unread=(*record.unread, *names))


def _continuation(record: Record, tokenizer: Tokenizer) -> list[WeightedPart]:
    """Return the parts of a text, or of a prompt and its completion without a dialog format."""
    if record.text is not None:  # as pretraining learns documents
        return [(ids, record.weights[0]) for ids in document_ids(tokenizer, record.text)]
    plain = record.plain
    if plain is None:
        raise TrainingError(
            f"is a dialog, and {tokenizer.source} has no dialog format; choose a chat model, or llama3 or chatml where "
            "its vocabulary has their control tokens"
        )
    if not tokenizer.eos_token_ids:
        raise TrainingError(f"{tokenizer.source} has no end-of-text token, so where an answer ends cannot be learned")
    weight = answer_weights(record)[-1]
    learned = [*tokenizer.encode(plain.completion, add_special_tokens=False), tokenizer.eos_token_ids[0]]
    return [(tokenizer.encode(written_prompt(plain)), 0.0), (learned, weight)]


def _plain_prompt(record: Record, tokenizer: Tokenizer) -> str:
    """Return a prompt as a text, without a dialog format."""
    if record.plain is None:
        raise TrainingError(f"is a dialog, and {tokenizer.source} has no dialog format; write prompts instead")
    return written_prompt(record.plain)


def written_prompt(plain: Plain) -> str:
    """Return a prompt as a base model is given it: an instruction within Alpaca's template."""
    if plain.input is None:
        return plain.prompt
    return (_ALPACA_INPUT if plain.input else _ALPACA).format(instruction=plain.prompt, input=plain.input)


def joined(form: str, parts: Sequence[WeightedPart]) -> Example:
    """Join the parts of an example in a form; TrainingError if nothing of it is learned."""
    ids = np.array([i for part, _ in parts for i in part], dtype=np.int32)
    weights = np.array([weight for part, weight in parts for _ in part], dtype=np.float32)
    weights[:1] = 0
    learned = weights > 0
    if not learned.any():
        raise TrainingError(
            "has nothing to learn: no message is the assistant's, all weights are 0, or there is one token"
        )
    return Example(ids, learned, form, None if (weights[learned] == 1).all() else weights)


def checked_pair(pair: list[Example]) -> list[Example]:
    """Return a pair of which one answer can be preferred; TrainingError for others."""
    chosen, rejected = pair
    if np.array_equal(chosen.ids, rejected.ids):
        raise TrainingError("chosen and rejected are the same tokens, of which neither can be preferred")
    if chosen.ids[0] != rejected.ids[0]:
        raise TrainingError(
            "nothing stands before the answers, whose first tokens cannot be learned then; write a prompt"
        )
    return pair
