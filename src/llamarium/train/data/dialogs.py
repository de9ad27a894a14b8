"""Read dialogs for fine-tuning: the assistant's messages are learned, all others are context.

A row of the data (see `data/sources.py`) is one example, in one of five forms, which may be mixed:

    {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}
    {"prompt": "2+2?", "completion": "4"}
    {"instruction": "Add.", "input": "2 and 2", "output": "4"}        ("input" may be missing or empty)
    {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]}
    {"text": "Two and two are four."}                                 (only where the row has no other form)

Learned are an answer's tokens and the one that ends it, so that a model learns to stop; of a text all, as documents
are learned in pretraining, with what begins and ends them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from llamarium.errors import TrainingError, escape, show_value
from llamarium.tokenizer.base import Tokenizer
from llamarium.tokenizer.chat.format import Part
from llamarium.train.data.sources import at_place, document_ids, read_rows

Dialog = Sequence[Mapping[str, Any]]

_FORMS = (("messages",), ("conversations",), ("prompt", "completion"), ("instruction", "output"))
QUESTIONS = ("prompt", "messages", "conversations")
"""The forms of what is to be answered: the keys."""

_TEXT = ("text",)  # no form beside another one: rows of Alpaca have their whole prompt as a text, too
_ROLES = {"human": "user", "gpt": "assistant", **{role: role for role in ("user", "assistant", "system", "tool")}}
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
    """One example: ids, int32 (n,), and which are learned, bool (n,); never the first, as nothing precedes it.

    `form` is the first key of the row's form.
    """

    ids: NDArray[np.int32]
    learned: NDArray[np.bool_]
    form: str = ""


def _itself(record: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    refuse_keys(record, ("chosen", "rejected"))
    return [record]


def read_dialogs(
    source: str | Path,
    tokenizer: Tokenizer,
    *,
    chat: bool = True,
    expand: Callable[[Mapping[str, Any]], Sequence[Mapping[str, Any]]] = _itself,
    finish: Callable[[list[Example]], list[Example]] = list,
) -> list[Example]:
    """Read the examples of a source: see `read_rows` and the forms above.

    Prompts and instructions become dialogs of two messages if the tokenizer has a dialog format and `chat` is true.
    Without one (a base model) the answer follows the prompt directly, and an instruction uses Alpaca's template.

    `expand` turns a row's fields into the records of examples, `finish` selects or checks a row's examples.
    TrainingError for a source that cannot be read or holds no example; for a row that is no example, or has nothing to
    learn, with its place.
    """
    form = tokenizer.chat_format if chat else None
    dialogs: list[Dialog] = []
    found: list[tuple[str, str, list[Part] | None]] = []  # place, form, and the parts of what is no dialog
    for place, row in read_rows(str(source)):
        with at_place(place):
            for record in expand(row):
                keys = _form(record)
                parts = None if form and keys != _TEXT else _continuation(record, keys, tokenizer)
                if parts is None:
                    dialogs.append(_dialog(record, keys))
                found.append((place, keys[0], parts))
    if not found:
        raise TrainingError(f"{escape(source)}: holds no example; expected a JSON object on each line, or rows")
    parts_of = iter(()) if form is None else form.parts_of(dialogs)
    examples: list[Example] = []
    for place, row in groupby(found, key=lambda item: item[0]):
        with at_place(place):
            examples += finish([_join(next(parts_of) if parts is None else parts, kind) for _, kind, parts in row])
    return examples


def refuse_keys(record: Mapping[str, Any], names: Iterable[str]) -> None:
    """Refuse keys that are not read but would change what is learned."""
    for name in names:
        if record.get(name):
            raise TrainingError(f"has {name!r}, which is not read; write it into the messages, or take it out")


def _form(record: Mapping[str, Any]) -> tuple[str, ...]:
    refuse_keys(record, _NOT_READ)
    forms = [form for form in _FORMS if all(name in record for name in form)]
    if not forms and _TEXT[0] in record:
        return _TEXT
    if len(forms) != 1:
        raise TrainingError(
            f"has the keys {show_value(list(record))}; expected messages, or conversations, or prompt and completion, "
            "or instruction and output (and input), and only one of them; or text"
        )
    return forms[0]


def messages_of(record: Mapping[str, Any]) -> Any:
    """Return the messages of a row of `messages` or `conversations`; TrainingError for roles that are not known."""
    if "conversations" not in record:
        return record["messages"]
    said = record["conversations"]
    if not isinstance(said, list):
        raise TrainingError(f"conversations is {show_value(said)}; expected a list")
    return [_message(number, message) for number, message in enumerate(cast("list[Any]", said))]


def question_of(record: Mapping[str, Any]) -> list[Any]:
    """Return the messages of a row that end with what is to be answered; TrainingError for others."""
    messages: Any = messages_of(record)
    last: Any = messages[-1] if isinstance(messages, list) and messages else None
    if not isinstance(last, dict) or cast("dict[str, Any]", last).get("role") == "assistant":
        found = show_value(cast(Any, messages))
        raise TrainingError(f"messages is {found}; expected a list that ends with what is to be answered")
    return cast("list[Any]", messages)


def _message(number: int, said: Any) -> Mapping[str, Any]:
    """Return what ShareGPT calls from and value as a message; one that has a role and a content is one already."""
    where, pairs = f"conversations[{number}]", cast("dict[str, Any]", said if isinstance(said, dict) else {})
    fields = {name: value for name, value in pairs.items() if value is not None}
    if fields.keys() >= {"role", "content"}:
        return fields
    if fields.keys() != {"from", "value"}:
        raise TrainingError(f"{where} has the keys {show_value([*fields])}; expected from and value, and no others")
    if (role := _ROLES.get(str(fields["from"]))) is None:
        raise TrainingError(f"{where} is from {show_value(fields['from'])}; expected one of {', '.join(_ROLES)}")
    return {"role": role, "content": fields["value"]}


def _dialog(record: Mapping[str, Any], form: tuple[str, ...]) -> Dialog:
    if len(form) == 1:
        return messages_of(record)
    prompt, answer = (_text(record, name) for name in form)
    context = _context(record, form)
    question = f"{prompt}\n\n{context}" if context else prompt
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _continuation(record: Mapping[str, Any], form: tuple[str, ...], tokenizer: Tokenizer) -> list[Part]:
    if form == _TEXT:  # as pretraining learns documents
        return [(ids, True) for ids in document_ids(tokenizer, _text(record, "text"))]
    if len(form) == 1:
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


def _join(parts: Sequence[Part], form: str) -> Example:
    ids = np.array([i for part, _ in parts for i in part], dtype=np.int32)
    learned = np.array([learns for part, learns in parts for _ in part], dtype=np.bool_)
    learned[:1] = False
    if not learned.any():
        raise TrainingError("has nothing to learn: no message is the assistant's, or there is one token")
    return Example(ids, learned, form)
