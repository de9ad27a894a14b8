"""Encode the examples of a data set: the tokens of answers are learned, all others are context.

`datasets/forms.py` defines which rows are examples. The token that ends an answer is learned too, so that a model
learns to stop. A plain text is learned whole, like a document in pretraining, with its begin and end tokens.

Rows are read and encoded in chunks of several hundred, so only the token ids stay in memory: 5 bytes per token, 9 with
weights.
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
"""Rows that are encoded together, as a chat template runs in a subprocess."""

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
    """A row and its records."""

    row: Row
    records: Sequence[Record]


class Example(NamedTuple):
    """An encoded example.

    Attributes:
        ids: int32, (n,).
        learned: bool, (n,); True for learned tokens. The first token is never learned, as nothing precedes it.
        form: First field of the row's form.
        weights: float32, (n,); loss weights. None means 1.
        place: The row's place for messages, e.g. "data.jsonl:3".
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
    """Read and encode the examples of a source; see `datasets/forms.py` for the forms of rows.

    Prompts and instructions become dialogs of two messages if the tokenizer has a dialog format and `chat` is true.
    Otherwise (a base model) the answer directly follows the prompt, and instructions use Alpaca's template.

    Args:
        source: Name or path of the source.
        tokenizer: Encodes the examples.
        chat: Use the tokenizer's dialog format.
        reading: Names of columns and roles, and whether to skip bad rows.
        understand: Converts a row's fields to records.
        finish: Selects or checks a row's examples.
        tally: Counts the rows, with its own `reading`; None warns of unread fields and skipped rows instead.

    Raises:
        TrainingError: If the source cannot be read or has no example; if a row is not an example or has no learned
            tokens, with its place.
    """
    counts = tally or Tally(escape(source), reading or Reading())
    examples: list[Example] = []
    rows = read_rows_in_order(str(source), counts)
    while chunk := [*islice(rows, ROWS_AT_ONCE)]:
        for row, records, encoded in encoded_rows(chunk, tokenizer, counts, chat=chat, understand=understand):
            with counts.at(row.place):
                dialogs = [joined(record.form, parts) for record, parts in zip(records, encoded, strict=True)]
                examples += [example._replace(place=row.place) for example in finish(dialogs)]
    if not examples:
        raise TrainingError(f"{escape(source)}: holds no example{counts.why_none}")
    if tally is None:
        counts.warn()
    return examples


def encoded_rows(
    rows: Sequence[Row | BadRow], tokenizer: Tokenizer, tally: Tally, *, chat: bool, understand: Understand
) -> Iterator[tuple[Row, Sequence[Record], list[list[WeightedPart]]]]:
    """Yield rows with their records and the records' parts; `tally` handles rows that cannot be encoded."""
    form = tokenizer.chat_format if chat else None
    understood = understood_rows(rows, form, tally, understand)

    # All dialogs in one call, as a chat template runs in a subprocess.
    dialogs = [record for _, records in _usable(understood) for record in records if _is_dialog(record, form)]
    parts_of = iter(()) if form is None else weighted_dialogs(form, dialogs)
    for row, records in _usable(understood, tally):
        encoded_records = [next(parts_of) if _is_dialog(record, form) else None for record in records]
        encoded: list[list[WeightedPart]] = []
        with tally.at(row.place):
            for record, parts in zip(records, encoded_records, strict=True):
                encoded.append(_continuation(record, tokenizer) if parts is None else value_of(parts))
        if len(encoded) == len(records):
            yield row, records, encoded


def encoded_prompts(
    rows: Sequence[Row | BadRow], tokenizer: Tokenizer, tally: Tally, *, chat: bool
) -> Iterator[tuple[Row, Record, list[int]]]:
    """Yield rows of prompts with their records and ids; `tally` handles rows that cannot be encoded."""
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
    """Return rows with their records, without fields that the dialog format does not use; `tally` counts those.

    An invalid row becomes a `BadRow` in its place, so that errors are raised in the order of the rows.
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
    """Yield the valid rows; `tally` counts the others."""
    for row in rows:
        if isinstance(row, Understood):
            yield row
        elif tally is not None:
            tally.skip(row)


def _is_dialog(record: Record, form: ChatFormat | None) -> bool:
    return form is not None and record.text is None


def _fitting_keys(record: Record, form: ChatFormat | None) -> Record:
    """Remove message keys and template variables that the format does not use, and list them in `unread`."""
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
    """Return the parts of a text, or of a prompt and its completion, without a dialog format."""
    if record.text is not None:  # like a document in pretraining
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
    """Return the text of a prompt without a dialog format."""
    if record.plain is None:
        raise TrainingError(f"is a dialog, and {tokenizer.source} has no dialog format; write prompts instead")
    return written_prompt(record.plain)


def written_prompt(plain: Plain) -> str:
    """Return the text of a prompt for a base model; instructions use Alpaca's template."""
    if plain.input is None:
        return plain.prompt
    return (_ALPACA_INPUT if plain.input else _ALPACA).format(instruction=plain.prompt, input=plain.input)


def joined(form: str, parts: Sequence[WeightedPart]) -> Example:
    """Concatenate the parts of an example; TrainingError if it has no learned tokens."""
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
    """Return a pair unchanged; TrainingError if its answers are equal or have no prompt."""
    chosen, rejected = pair
    if np.array_equal(chosen.ids, rejected.ids):
        raise TrainingError("chosen and rejected are the same tokens, of which neither can be preferred")
    if chosen.ids[0] != rejected.ids[0]:
        raise TrainingError(
            "nothing stands before the answers, whose first tokens cannot be learned then; write a prompt"
        )
    return pair
