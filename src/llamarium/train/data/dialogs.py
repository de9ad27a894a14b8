"""Read dialogs for fine-tuning: the assistant's messages are learned, all others are context.

A line of the JSONL file is one example, in one of three forms, which may be mixed:

    {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}
    {"prompt": "2+2?", "completion": "4"}
    {"instruction": "Add.", "input": "2 and 2", "output": "4"}        ("input" may be missing or empty)

Learned are an answer's tokens and the one that ends it, so that a model learns to stop.
"""

import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from llamarium.config import without_duplicates
from llamarium.errors import LlamariumError, TrainingError, escape, show_value
from llamarium.io import regular_size
from llamarium.tokenizer.base import Tokenizer
from llamarium.tokenizer.chat.format import Part

Dialog = Sequence[Mapping[str, Any]]

_FORMS = (("messages",), ("prompt", "completion"), ("instruction", "output"))
# What would change the prompt if it were read; an example that has it is not understood without.
_NOT_READ = ("tools", "functions", "system", "history")

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
    """One example: ids, int32 (n,), and which are learned, bool (n,); never the first, as nothing precedes it."""

    ids: NDArray[np.int32]
    learned: NDArray[np.bool_]


def _itself(record: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    refuse_keys(record, ("chosen", "rejected"))
    return [record]


def read_dialogs(
    path: Path,
    tokenizer: Tokenizer,
    *,
    chat: bool = True,
    expand: Callable[[Mapping[str, Any]], Sequence[Mapping[str, Any]]] = _itself,
    finish: Callable[[list[Example]], list[Example]] = list,
) -> list[Example]:
    """Read a JSONL file of examples: UTF-8, one JSON object a line; empty lines are skipped.

    Prompts and instructions become dialogs of two messages if the tokenizer has a dialog format and `chat` is true.
    Without one (a base model) the answer follows the prompt directly, and an instruction uses Alpaca's template.

    `expand` turns a line's object into the records of examples, `finish` selects or checks a line's examples.
    TrainingError for a file that cannot be read or holds no example; for a line that is no example, or has nothing to
    learn, with file and line.
    """
    form = tokenizer.chat_format if chat else None
    found: list[tuple[int, Dialog | list[Part]]] = []
    for number, record in json_lines(path):
        with at_line(path, number):
            records = expand(record)
            found += [(number, _continuation(r, tokenizer) if form is None else _dialog(r)) for r in records]
    if not found:
        raise TrainingError(f"{escape(path)}: holds no example; expected a JSON object on each line")
    every = (content for _, content in found)
    parts_of = cast("Iterator[list[Part]]", every) if form is None else form.parts_of(cast("list[Dialog]", [*every]))
    examples: list[Example] = []
    for number, line in groupby(number for number, _ in found):
        with at_line(path, number):
            examples += finish([_join(next(parts_of)) for _ in line])
    return examples


def refuse_keys(record: Mapping[str, Any], names: Iterable[str]) -> None:
    """Refuse keys that are not read but would change what is learned."""
    for name in names:
        if record.get(name):
            raise TrainingError(f"has {name!r}, which is not read; write it into the messages, or take it out")


@contextmanager
def at_line(path: Path, number: int) -> Generator[None]:
    """Name file and line in errors of the body, as a TrainingError."""
    try:
        yield
    except LlamariumError as error:
        raise TrainingError(f"{escape(path)}:{number}: {error}") from None


def json_lines(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the objects of a JSONL file, with the numbers of their lines; TrainingError where there is none."""
    try:
        regular_size(path)
        with path.open("rb") as file:
            lines = [(number, line) for number, line in enumerate(file, 1) if line.strip()]
    except (OSError, LlamariumError) as error:
        raise TrainingError(f"the examples cannot be read: {escape(error)}") from None
    for number, line in lines:
        with at_line(path, number):
            record = _parse(line)
        yield number, record


def _parse(line: bytes) -> Mapping[str, Any]:
    try:
        record = json.loads(line.decode("utf-8-sig"), object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError) as error:
        raise TrainingError(f"no JSON: {escape(error)}; expected one object on a line") from None
    if not isinstance(record, dict):
        raise TrainingError(f"{show_value(record)} is no JSON object")
    return cast("dict[str, Any]", record)


def _form(record: Mapping[str, Any]) -> tuple[str, ...]:
    refuse_keys(record, _NOT_READ)
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
    question = f"{prompt}\n\n{context}" if context else prompt
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


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
