"""Inspect a data set before training: forms and lengths of its rows, and problems."""

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from llamarium.datasets.forms import PAIRED, Record, Understand, example_of, pair_of, prompt_of
from llamarium.datasets.rows import BadRow, Reading, Row, Tally
from llamarium.datasets.sources import read_rows_in_order
from llamarium.errors import LlamariumError, TrainingError, escape, show_value
from llamarium.tokenizer.base import Tokenizer
from llamarium.train.data.answer_weights import WeightedPart
from llamarium.train.data.dialogs import (
    ROWS_AT_ONCE,
    Example,
    checked_pair,
    encoded_prompts,
    encoded_rows,
    joined,
)

Purpose = Literal["auto", "finetune", "dpo", "grpo"]

_UNDERSTAND: Mapping[str, Understand] = {"finetune": example_of, "dpo": pair_of, "grpo": prompt_of}
_SHARES = (0.0, 0.5, 0.95, 1.0)


class Sample(NamedTuple):
    """An example to show: its place (with the answer's name in a pair), and its ids."""

    place: str
    example: Example


@dataclass(slots=True)
class Survey:
    """Statistics of a data set.

    Attributes:
        source: Name of the source.
        purpose: Training command that the data is for.
        tally: Counts of rows, problems and unread fields.
        forms: Number of rows by the first field of their form.
        roles: Number of messages by role.
        num_with_tools: Number of rows with tool definitions.
        lengths: Tokens of each example; a pair is two examples.
        num_learned: Learned tokens of all examples.
        samples: The first examples or pairs.
    """

    source: str
    purpose: str
    tally: Tally
    forms: Counter[str] = field(default_factory=Counter[str])
    roles: Counter[str] = field(default_factory=Counter[str])
    num_with_tools: int = 0
    lengths: "array[int]" = field(default_factory=lambda: array("i"))
    num_learned: int = 0
    samples: list[Sample] = field(default_factory=list[Sample])

    @property
    def quantiles(self) -> list[int]:
        """Minimum, median, 95th percentile and maximum of the lengths; empty without examples."""
        if not self.lengths:
            return []
        return [int(value) for value in np.quantile(np.array(self.lengths), _SHARES, method="inverted_cdf")]

    @property
    def num_units(self) -> int:
        """Number of examples, pairs or prompts."""
        return len(self.lengths) // self._together

    def num_longer(self, context: int, max_tokens: int) -> int:
        """Return the number of examples or pairs longer than a row of `context` tokens, counted as in training.

        Both answers of a pair share a row. Prompts count if they leave less than `max_tokens` for the answer.
        """
        lengths = np.array(self.lengths)
        if self.purpose == "grpo":
            return int((lengths + max_tokens > context).sum())
        in_row = (lengths - 1).reshape(-1, self._together).sum(axis=1)  # the last token is only a label
        return int((in_row > context).sum())

    @property
    def _together(self) -> int:
        return 2 if self.purpose == "dpo" else 1

    def add(self, row: Row, records: Sequence[Record], examples: Sequence[Example], num_samples: int) -> None:
        """Count a row, and keep the examples of the first rows."""
        self.forms[records[0].form] += 1
        self.num_with_tools += bool(records[0].tools)
        names = [f"{row.place}, {name}" for name in PAIRED] if self.purpose == "dpo" else [row.place]
        is_shown = len(self.samples) < num_samples * self._together
        for name, record, example in zip(names, records, examples, strict=True):
            self.roles.update(message["role"] for message in record.messages)
            self.lengths.append(len(example.ids))
            self.num_learned += int(example.learned.sum())
            if is_shown:
                self.samples.append(Sample(name, example))

    def to_dict(self) -> dict[str, Any]:
        """Return the counts as JSON values."""
        tally = self.tally
        return {
            "source": self.source,
            "purpose": self.purpose,
            "rows": tally.num_rows,
            "bad_rows": tally.num_skipped,
            "rows_of_weight_0": tally.num_without_weight,
            "problems": [{"place": bad.place, "problem": bad.problem} for bad in tally.problems],
            "forms": dict(self.forms),
            "roles": dict(self.roles),
            "rows_with_tools": self.num_with_tools,
            "not_read": dict(tally.unread),
            "missing": sorted(tally.missing),
            "tokens": sum(self.lengths),
            "learned_tokens": self.num_learned,
            "lengths": dict(zip(("min", "median", "p95", "max"), self.quantiles, strict=False)),
        }


def survey(
    source: str,
    tokenizer: Tokenizer,
    *,
    purpose: Purpose = "auto",
    reading: Reading | None = None,
    chat: bool = True,
    max_rows: int | None = None,
    num_samples: int = 3,
) -> Survey:
    """Read a data set as in training, and count its rows; unusable rows become problems of the tally.

    Only the lengths of the rows are kept, 4 bytes each, so a data set may be larger than memory. `purpose` "auto" is
    inferred from the first usable row. TrainingError if the source cannot be read to its end, or if `max_rows` is less
    than 1.
    """
    if max_rows is not None and max_rows < 1:
        raise TrainingError(f"max_rows is {max_rows}; expected at least 1")
    if purpose not in get_args(Purpose):
        raise TrainingError(f"purpose is {show_value(purpose)}; expected {', '.join(get_args(Purpose))}")
    fields = reading or Reading()
    tally = Tally(escape(source), Reading(fields.columns, fields.roles, skip_bad=True))
    result = Survey(source, purpose, tally)
    rows = islice(read_rows_in_order(source, tally), max_rows)
    while chunk := [*islice(rows, ROWS_AT_ONCE)]:
        if result.purpose == "auto":
            result.purpose = _purpose_of([row.fields for row in chunk if isinstance(row, Row)], tally.reading)
        for row, records, examples in _examples(result, chunk, tokenizer, chat=chat):
            with tally.at(row.place):
                result.add(row, records, examples(), num_samples)
    result.purpose = "finetune" if result.purpose == "auto" else result.purpose
    return result


def _purpose_of(rows: Sequence[Mapping[str, Any]], reading: Reading) -> str:
    """Return the training command for the first usable row, or "auto" if no row is usable.

    A row with a completion is never data for GRPO, even if prompt and completion are unusable.
    """
    for fields in rows:
        for purpose in ("dpo", "finetune", "grpo"):
            if purpose == "grpo" and "completion" in fields:
                continue
            try:
                _UNDERSTAND[purpose](fields, reading)
            except LlamariumError:
                continue
            return purpose
    return "auto"


def _examples(
    found: Survey, rows: Sequence[Row | BadRow], tokenizer: Tokenizer, *, chat: bool
) -> Iterator[tuple[Row, Sequence[Record], Callable[[], list[Example]]]]:
    """Yield rows, their records, and a function that returns their examples or raises; prompts have no labels."""
    if found.purpose == "grpo":
        for row, record, ids in encoded_prompts(rows, tokenizer, found.tally, chat=chat):
            example = Example(np.array(ids, np.int32), np.zeros(len(ids), np.bool_), record.form)
            yield row, [record], partial(list[Example], [example])
        return
    options = {"chat": chat, "understand": _UNDERSTAND.get(found.purpose, example_of)}
    for row, records, encoded in encoded_rows(rows, tokenizer, found.tally, **options):  # pyright: ignore[reportArgumentType]
        yield row, records, partial(_joined, records, encoded, is_pair=found.purpose == "dpo")


def _joined(records: Sequence[Record], encoded: Sequence[list[WeightedPart]], *, is_pair: bool) -> list[Example]:
    examples = [joined(record.form, parts) for record, parts in zip(records, encoded, strict=True)]
    return checked_pair(examples) if is_pair else examples
