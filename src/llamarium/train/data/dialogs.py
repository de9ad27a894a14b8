"""Dialogs to fine-tune on: what the assistant says is learned, what it is told is only read.

A line of the JSONL file is one example, in one of three forms, which may be mixed:

    {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}
    {"prompt": "2+2?", "completion": "4"}
    {"instruction": "Add.", "input": "2 and 2", "output": "4"}        ("input" may be missing or empty)

Each becomes ids and, for every id, whether it is learned: an answer's tokens and the one that ends it, which is how a
model learns to stop. Examples are short and rows are long, so several lie side by side in a row, each a segment of its
own that begins at position 0 and sees only itself:

    ids        <u>2+2?<a>4<e><u>hi<a>hey____      <u>, <a>, <e>: header of the user and the assistant, end of turn
    labels     ......4<e>....... hey<e>.....      what follows, where it is learned
    segments   0000000000111111111111112222       the last one is padding

Nothing is ever cut: half an answer teaches to stop in the middle. An example that fits no row is refused, or left out
where that is asked for.
"""

import hashlib
import json
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray

from llamarium.config import without_duplicates
from llamarium.errors import LlamariumError, TrainingError, escape, show_value
from llamarium.io import regular_size
from llamarium.tokenizer.base import Tokenizer
from llamarium.tokenizer.chat import Part
from llamarium.train.data.batch import IGNORED, Batch
from llamarium.train.data.order import derived_seed

if TYPE_CHECKING:
    from rich.text import Text

TooLong = Literal["error", "drop"]
Dialog = Sequence[Mapping[str, Any]]

_FORMS = (("messages",), ("prompt", "completion"), ("instruction", "output"))
# What would change the prompt if it were read; an example that has it is not understood without.
_NOT_READ = ("tools", "functions", "system", "history")
# Rows that are filled at the same time: a longer search wastes less room, and mixes the order less.
_OPEN_ROWS = 32

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


class Example(NamedTuple):
    """One example.

    Attributes:
        ids: int32, (n,).
        learned: bool, (n,); the first is never learned, as nothing stands before it.
    """

    ids: NDArray[np.int32]
    learned: NDArray[np.bool_]


# --- reading ----------------------------------------------------------------------------------------------------------


def read_dialogs(path: Path, tokenizer: Tokenizer, *, chat: bool = True) -> list[Example]:
    """Read a JSONL file of examples.

    Prompts and instructions are dialogs of two messages where there is a dialog format. Without one (a base model)
    the answer follows the prompt as it is, and an instruction stands in Alpaca's words.

    Args:
        path: UTF-8, one JSON object a line; empty lines are passed over.
        tokenizer: The model's.
        chat: Use the tokenizer's dialog format, if it has one. Answers should later be asked for in the same one.

    Raises:
        TrainingError: For a file that cannot be read or holds no example; for a line that is no example, or has
            nothing to learn, with file and line.
    """
    form = tokenizer.chat_format if chat else None
    found: list[tuple[int, Dialog | list[Part]]] = []
    for number, line in _lines(path):
        with _at(path, number):
            record = _parse(line)
            found.append((number, _continuation(record, tokenizer) if form is None else _dialog(record)))
    if not found:
        raise TrainingError(f"{escape(path)}: holds no example; expected a JSON object on each line")
    every = (content for _, content in found)
    parts_of = cast("Iterator[list[Part]]", every) if form is None else form.parts_of(cast("list[Dialog]", [*every]))
    examples: list[Example] = []
    for number, _ in found:
        with _at(path, number):
            examples.append(_join(next(parts_of)))
    return examples


@contextmanager
def _at(path: Path, number: int) -> Generator[None]:
    try:
        yield
    except LlamariumError as error:
        raise TrainingError(f"{escape(path)}:{number}: {error}") from None


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not empty, and their numbers from 1."""
    try:
        regular_size(path)
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except (OSError, LlamariumError) as error:
        raise TrainingError(f"the dialogs cannot be read: {escape(error)}") from None


def _parse(line: bytes) -> Mapping[str, Any]:
    try:
        record = json.loads(line.decode("utf-8-sig"), object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError) as error:
        raise TrainingError(f"no JSON: {escape(error)}; expected one object on a line") from None
    if not isinstance(record, dict):
        raise TrainingError(f"{show_value(record)} is no JSON object")
    return cast("dict[str, Any]", record)


def _form(record: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the fields that make a record an example."""
    for name in _NOT_READ:
        if record.get(name):
            raise TrainingError(f"has {name!r}, which is not read; write it into the messages, or take it out")
    forms = [form for form in _FORMS if all(name in record for name in form)]
    if len(forms) != 1:
        raise TrainingError(
            f"has the keys {show_value(list(record))}; expected messages, or prompt and completion, or instruction and "
            "output (and input), and only one of the three"
        )
    return forms[0]


def _dialog(record: Mapping[str, Any]) -> Dialog:
    form = _form(record)
    if form == ("messages",):
        return record["messages"]
    prompt, answer = (_text(record, name) for name in form)
    context = _context(record, form)
    asked = f"{prompt}\n\n{context}" if context else prompt
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


def _continuation(record: Mapping[str, Any], tokenizer: Tokenizer) -> list[Part]:
    form = _form(record)
    if form == ("messages",):
        raise TrainingError(
            f"is a dialog, and {tokenizer.source} has no dialog format; choose a chat model, or llama3 or chatml "
            "where its vocabulary has their control tokens"
        )
    prompt, answer = (_text(record, name) for name in form)
    if form[0] == "instruction":
        context = _context(record, form)
        prompt = (_ALPACA_INPUT if context else _ALPACA).format(instruction=prompt, input=context)
    if not tokenizer.eos_token_ids:
        raise TrainingError(f"{tokenizer.source} has no end-of-text token, so where an answer ends cannot be learned")
    learned = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_ids[0]]
    return [(tokenizer.encode(prompt), False), (learned, True)]


def _context(record: Mapping[str, Any], form: tuple[str, ...]) -> str:
    return _text(record, "input") if form[0] == "instruction" and record.get("input") is not None else ""


def _text(record: Mapping[str, Any], name: str) -> str:
    value = record[name]
    if not isinstance(value, str):
        raise TrainingError(f"{name} is {show_value(value)}; expected text")
    return value


def _join(parts: Sequence[Part]) -> Example:
    ids = np.array([i for part, _ in parts for i in part], dtype=np.int32)
    learned = np.array([learns for part, learns in parts for _ in part], dtype=np.bool_)
    learned[:1] = False
    if not learned.any():
        raise TrainingError("has nothing to learn: no message is the assistant's")
    return Example(ids, learned)


# --- rows -------------------------------------------------------------------------------------------------------------


class DialogRows:
    """Examples packed into rows, in another order every epoch.

    Attributes:
        examples: What is learned from.
        context: T, the tokens of a row.
        fingerprint: SHA-256, hex, over the examples and everything else that shapes the rows.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        context: int,
        *,
        seed: int | None = 0,
        too_long: TooLong = "error",
        pad_id: int = 0,
    ) -> None:
        """Take examples.

        Args:
            examples: At least one.
            context: T, at least 1.
            seed: Of the order; None keeps that of the file in every epoch, as a validation wants it.
            too_long: What becomes of an example that no row can hold: "error", or "drop" with a warning.
            pad_id: Stands where a row has room left, and is never learned.

        Raises:
            TrainingError: For no example, or one that is too long.
        """
        if context < 1:
            raise TrainingError(f"a row of {context} tokens; expected a context of at least 1")
        if too_long not in ("error", "drop"):
            raise TrainingError(f'too_long is {show_value(too_long)}; expected "error" or "drop"')
        self.examples = _fitting(examples, context, too_long)
        self.context = context
        self._seed = seed
        self._pad_id = pad_id
        self._packed: dict[int, list[list[int]]] = {}  # by epoch; a batch may be of two
        self.fingerprint = self._hash()

    @classmethod
    def from_file(
        cls,
        path: Path,
        tokenizer: Tokenizer,
        context: int,
        *,
        seed: int | None = 0,
        too_long: TooLong = "error",
        chat: bool = True,
    ) -> "DialogRows":
        """Read a JSONL file; see `read_dialogs` and the constructor."""
        examples = read_dialogs(path, tokenizer, chat=chat)
        pad_id = tokenizer.pad_token_id
        if pad_id is None:
            pad_id = (*tokenizer.eos_token_ids, 0)[0]
        return cls(examples, context, seed=seed, too_long=too_long, pad_id=pad_id)

    def split(self, validation: float) -> "tuple[DialogRows, DialogRows]":
        """Return the first examples to train on, and the last `validation` of them, in a fixed order, to validate.

        Raises:
            TrainingError: If either would have none.
        """
        count = max(1, round(len(self.examples) * validation)) if validation > 0 else 0
        if not 0 < count < len(self.examples):
            raise TrainingError(
                f"a share of {show_value(validation)} of {len(self.examples)} examples is {count}; expected at least "
                "one to validate and one to train on; without validation give 0"
            )
        train, held_out = self.examples[:-count], self.examples[-count:]
        rows = DialogRows(train, self.context, seed=self._seed, pad_id=self._pad_id)
        rows.fingerprint = hashlib.sha256(f"{self.fingerprint} {count}".encode()).hexdigest()  # held-out ones count
        return rows, DialogRows(held_out, self.context, seed=None, pad_id=self._pad_id)

    @property
    def about(self) -> dict[str, int]:
        """What the data is, so that a difference can be told."""
        return {"examples": len(self.examples), "tokens": sum(len(example.ids) for example in self.examples)}

    def num_rows(self, epoch: int) -> int:
        """Return how many rows an epoch's order packs into."""
        return len(self._rows(epoch))

    def batch(self, epoch: int, indices: Sequence[int]) -> Batch:
        """Return these rows of an epoch; the same arguments give the same tensors."""
        rows = self._rows(epoch)
        shape = (len(indices), self.context)
        ids_BT, labels_BT = np.full(shape, self._pad_id, np.int64), np.full(shape, IGNORED, np.int64)
        positions_BT, segments_BT = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        for b, index in enumerate(indices):
            start = 0
            for segment, number in enumerate(rows[index]):
                example = self.examples[number]
                length = len(example.ids) - 1
                place = slice(start, start + length)
                ids_BT[b, place] = example.ids[:-1]
                labels_BT[b, place] = np.where(example.learned[1:], example.ids[1:], IGNORED)
                positions_BT[b, place], segments_BT[b, place] = np.arange(length), segment
                start = place.stop
            positions_BT[b, start:], segments_BT[b, start:] = np.arange(self.context - start), len(rows[index])
        ids, labels, positions, segments = map(torch.from_numpy, (ids_BT, labels_BT, positions_BT, segments_BT))
        return Batch(ids, labels, positions, segments if segments.any() else None)

    def _rows(self, epoch: int) -> list[list[int]]:
        if epoch not in self._packed:
            packed = _pack([len(e.ids) - 1 for e in self.examples], self._order(epoch), self.context)
            self._packed = {**dict([*self._packed.items()][-1:]), epoch: packed}
        return self._packed[epoch]

    def _order(self, epoch: int) -> list[int]:
        if self._seed is None:
            return list(range(len(self.examples)))
        generator = torch.Generator().manual_seed(derived_seed("dialogs", self._seed, epoch))
        return torch.randperm(len(self.examples), generator=generator).tolist()

    def _hash(self) -> str:
        digest = hashlib.sha256(f"dialog rows 1 {self.context} {self._seed} {self._pad_id}".encode())
        for ids, learned in self.examples:
            digest.update(len(ids).to_bytes(8, "little"))
            digest.update(ids.tobytes())
            digest.update(learned.tobytes())
        return digest.hexdigest()


def _fitting(examples: Sequence[Example], context: int, too_long: TooLong) -> list[Example]:
    """Return the examples that a row can hold; the last token of one is a label only, and takes no room."""
    if not examples:
        raise TrainingError("there is no example; expected at least one")
    fitting = [example for example in examples if len(example.ids) - 1 <= context]
    num_long = len(examples) - len(fitting)
    if not num_long:
        return fitting
    longest = max(len(example.ids) for example in examples) - 1
    found = f"{num_long} of {len(examples)} examples are longer than a row of {context} tokens, the longest {longest}"
    if too_long == "error" or not fitting:
        raise TrainingError(f"{found}; use a longer context, shorten them, or drop them (too_long='drop')")
    warnings.warn(f"{found}; they are left out", stacklevel=3)
    return fitting


def _pack(lengths: Sequence[int], order: Sequence[int], room: int) -> list[list[int]]:
    """Put each example, in this order, into the first row that has room for it.

    Only the latest rows are looked at, so that this takes linear time and the order stays mixed.
    """
    rows: list[list[int]] = []
    left: list[int] = []
    for number in order:
        recent = range(max(0, len(rows) - _OPEN_ROWS), len(rows))
        row = next((row for row in recent if left[row] >= lengths[number]), None)
        if row is None:
            row = len(rows)
            rows.append([])
            left.append(room)
        rows[row].append(number)
        left[row] -= lengths[number]
    return rows


# --- showing ----------------------------------------------------------------------------------------------------------

_OPEN, _CLOSE = "⟦", "⟧"


def preview(batch: Batch, tokenizer: Tokenizer, row: int = 0) -> "Text":
    """Show a row as text: what is learned in green and within ⟦ ⟧, what is only read dim.

    Control tokens are spelled, and characters that could drive a terminal are escaped.
    """
    from rich.text import Text

    shown = Text()
    for number, (ids, learned) in enumerate(_segments(batch, row)):
        if not learned.any():
            shown.append(f"── {len(ids)} tokens without anything to learn (padding)\n", "bold")
            continue
        shown.append(f"── example {number + 1}: {len(ids)} tokens, {int(learned.sum())} learned\n", "bold")
        borders = np.flatnonzero(np.diff(learned)) + 1
        for part, learns in zip(np.split(ids, borders), np.split(learned, borders), strict=True):
            text = _visible(tokenizer.decode(part.tolist(), skip_special_tokens=False))
            if learns[0]:
                shown.append(f"{_OPEN}{text}{_CLOSE}", "bold green")
            else:
                shown.append(text, "dim")
        shown.append("\n")
    return shown


def _segments(batch: Batch, row: int) -> Iterator[Example]:
    """Yield a row's examples again: each token stands after the one whose label it is."""
    ids, labels = batch.ids_BT[row].cpu().numpy(), batch.labels_BT[row].cpu().numpy()
    starts = np.flatnonzero(batch.positions_BT[row].cpu().numpy() == 0)
    for start, stop in zip(starts, [*starts[1:], len(ids)], strict=True):
        learned = np.concatenate(([False], labels[start:stop] != IGNORED))
        last = labels[stop - 1]
        tokens = np.concatenate((ids[start:stop], [last]))
        count = len(tokens) if last != IGNORED else len(tokens) - 1
        yield Example(tokens[:count], learned[:count])


def _visible(text: str) -> str:
    return "".join(c if c.isprintable() or c == "\n" else escape(c) for c in text)
