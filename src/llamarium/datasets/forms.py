"""Forms of data set rows: examples, preference pairs and prompts, in the common formats.

| form              | fields of a row                                                     | for                      |
|-------------------|---------------------------------------------------------------------|--------------------------|
| dialog            | `messages`                                                          | finetune, dpo*, grpo     |
| ShareGPT          | `conversations`                                                     | finetune, dpo*, grpo     |
| prompt-completion | `prompt` and `completion`: texts, or lists of messages              | finetune                 |
| Alpaca            | `instruction` (with `input`) and `output`                           | finetune, dpo*           |
| text              | `text`; only if a row has no other form                             | finetune, pretrain       |
| preference        | `chosen` and `rejected`, with or without `prompt`: texts or messages | dpo                     |
| prompt            | `prompt`: a text, or messages                                       | grpo                     |

(*) with `chosen` and `rejected` instead of the last answer. A row of any form may also have `system`, `tools` (or
`functions`; a list, or its JSON), `history` (Alpaca's earlier turns), `chat_template_kwargs` (for the template) and
`weight` (a number from 0, for finetune; rows with weight 0 are always skipped). Other fields are read only by rewards.

Without a `prompt`, the common beginning of both answers is the prompt: messages, or text up to the last blank. Messages
may be given as JSON text, as in a table's cell. An answer may repeat the messages of its prompt.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os.path import commonprefix
from typing import Any, NamedTuple, cast

from llamarium.datasets.beside import BESIDE, earlier_messages, text_of, tools_of, weight_of, with_earlier
from llamarium.datasets.messages import (
    ASSISTANT,
    ROLES,
    SYSTEM,
    USER,
    Messages,
    from_json,
    read_message,
    read_messages,
)
from llamarium.datasets.rows import Reading
from llamarium.errors import TrainingError, show_value
from llamarium.strict_json import NotJson, parse_json
from llamarium.tokenizer.chat.format import TrainingDialog
from llamarium.tokenizer.tools.definition import ToolDefinition

_FORMS = (("messages",), ("conversations",), ("prompt", "completion"), ("instruction", "output"))
PAIRED = ("chosen", "rejected")
_DIALOGS = ("messages", "conversations")
_LIST_OF_OBJECTS = re.compile(r"\s*\[\s*\{")
_MESSAGES = re.compile(r"""\s*\[\s*\{\s*"(role|from)"\s*:""")
_MESSAGES_OF_PYTHON = re.compile(r"""\s*\[\s*\{\s*'(role|from|content|value)'\s*:""")  # repr, as pandas writes
_EXPECTED = (
    "expected messages, or conversations, or prompt and completion, or instruction and output (and input), and only "
    "one of them; or text (other names: --columns prompt=NAME,completion=NAME)"
)
_EXPECTED_PAIR = (
    "expected chosen and rejected, and none or one of prompt, messages, conversations and instruction (other names: "
    "--columns chosen=NAME,rejected=NAME)"
)
_EXPECTED_PROMPT = (
    "expected one of prompt, messages and conversations, and what the reward reads (other names: --columns prompt=NAME)"
)


class Plain(NamedTuple):
    """A prompt and its completion as plain texts, for base models without a dialog format.

    For an Alpaca row `prompt` is the instruction, and `input` its input.
    """

    prompt: str
    completion: str
    input: str | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """A parsed example or prompt.

    Attributes:
        form: First field of the row's form.
        messages: Messages of the dialog; empty for a text.
        weights: Loss weight of each message; above 0 only for the assistant's.
        text: Text of a document, or None for other forms.
        plain: Prompt and completion as plain texts, or None if the row is a dialog.
        tools: Tools that the assistant may call.
        variables: Variables of the chat template.
        unread: Fields of the row that are ignored, and descriptions of ignored parts of others.
    """

    form: str
    messages: Sequence[Mapping[str, Any]] = ()
    weights: Sequence[float] = ()
    text: str | None = None
    plain: Plain | None = None
    tools: tuple[ToolDefinition, ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict[str, Any])
    unread: tuple[str, ...] = ()

    @property
    def dialog(self) -> TrainingDialog:
        """The dialog, as input of a dialog format."""
        return TrainingDialog(self.messages, self.tools, self.variables)


def has_form(fields: Mapping[str, Any]) -> bool:
    """Return whether an object has all fields of a form, and so is a row."""
    forms = (*_FORMS, PAIRED, ("prompt",), ("text",))
    return any(all(fields.get(name) is not None for name in form) for form in forms)


def example_of(row: Mapping[str, Any], reading: Reading) -> tuple[Record, ...]:
    """Parse an example for fine-tuning into one record; TrainingError for other rows."""
    form = _form(row, reading)
    if form == ("text",):
        weight = weight_of(row)
        return (Record("text", text=text_of(row, "text"), weights=(weight,), unread=_unread(row, ("text", "weight"))),)
    dialog, plain = _dialog(row, form, reading)
    return (_record(row, form, dialog, plain, reading),)


def pair_of(row: Mapping[str, Any], reading: Reading) -> tuple[Record, ...]:
    """Parse a preference pair into two records, chosen and rejected; TrainingError for other rows.

    A pair has a single loss, so weights of messages are 0 or 1, and the row's weight is ignored.
    """
    unread = ("weight",) if row.get("weight") is not None else ()
    records = _pair({name: value for name, value in row.items() if name != "weight"}, reading)
    return tuple(
        replace(record, weights=[float(weight > 0) for weight in record.weights], unread=(*record.unread, *unread))
        for record in records
    )


def _pair(row: Mapping[str, Any], reading: Reading) -> tuple[Record, ...]:
    if not all(name in row for name in PAIRED):
        raise TrainingError(f"has the keys {show_value(list(row))}; {_EXPECTED_PAIR}")
    names = [name for name in ("prompt", *_DIALOGS, "instruction") if name in row]
    names = [name for name in names if name in reading.columns] or names
    if names == ["prompt", "messages"]:  # as in UltraFeedback, where `messages` repeats the chosen dialog
        names = ["prompt"]
    if len(names) > 1:
        raise TrainingError(f"has the keys {show_value(list(row))}; {_EXPECTED_PAIR}")
    chosen, rejected = row["chosen"], row["rejected"]
    is_text = names == ["prompt"] and _messages_in(row["prompt"], "prompt") is None
    if not names or (is_text and _messages_in(chosen, "chosen") is not None):
        return _with_common_prompt(row, names, reading)
    form = (names[0], *PAIRED)
    before, plain = _question(row, names[0], reading)
    records: list[Record] = []
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        answered = _answer(answer, name, reading)
        text = answer if isinstance(answer, str) else None
        ends = plain._replace(completion=text) if plain is not None and text is not None else None
        records.append(_record(row, form, _answered(before, answered), ends, reading))
    return tuple(records)


def prompt_of(row: Mapping[str, Any], reading: Reading) -> tuple[Record, ...]:
    """Parse a prompt for GRPO into one record; TrainingError for other rows.

    All other fields are passed to the reward.
    """
    names = [name for name in ("prompt", *_DIALOGS) if name in row]
    names = [name for name in names if name in reading.columns] or names
    if len(names) != 1:
        raise TrainingError(f"has the keys {show_value(list(row))}; {_EXPECTED_PROMPT}")
    before, plain = _question(row, names[0], reading)
    fields = {name: value for name, value in row.items() if name != "weight"}
    record = _record(fields, (names[0],), before, plain, reading)
    unread = [name for name in record.unread if name not in row]
    if row.get("weight") is not None:
        unread.append("weight, except by the reward")
    return (replace(record, unread=tuple(unread)),)


def _record(
    row: Mapping[str, Any], form: Sequence[str], dialog: Messages, plain: Plain | None, reading: Reading
) -> Record:
    """Return the record of a dialog, with the additional fields of its row."""
    earlier = earlier_messages(row)
    if not {"prompt", "chosen"}.isdisjoint(form):  # then only the answer is trained on
        earlier = Messages(earlier.messages, [0.0] * len(earlier.messages))
    messages, given = with_earlier(earlier, dialog)
    is_learned = [message["role"] == ASSISTANT for message in messages]
    share = weight_of(row)
    weights = [
        share * (1.0 if weight is None else weight) if learned else 0.0
        for learned, weight in zip(is_learned, given, strict=True)
    ]
    variables = row.get("chat_template_kwargs") or {}
    variables = from_json(variables, "chat_template_kwargs") if isinstance(variables, str) else variables
    if not isinstance(variables, Mapping):
        raise TrainingError(f"chat_template_kwargs is {show_value(variables)}; expected an object")
    extra = ("input",) if form[0] == "instruction" else ()
    tools, without_effect = tools_of(row)
    if any(weight for learned, weight in zip(is_learned, given, strict=True) if not learned):
        without_effect += ("weight or train of messages that are not the assistant's",)
    without_effect += tuple(f"messages in {name}: Python's notation, not JSON" for name in _of_python(row, form))
    return Record(
        form[0],
        messages,
        weights,
        plain=None if earlier.messages else plain,
        tools=tools,
        variables=cast("Mapping[str, Any]", variables),
        unread=(*_unread(row, (*form, *extra, *BESIDE)), *without_effect),
    )


def _of_python(row: Mapping[str, Any], form: Sequence[str]) -> list[str]:
    """Return the names of text fields that look like messages in Python notation, which are read as plain text."""
    texts = {name: row[name] for name in form if isinstance(row[name], str)}
    return [name for name, text in texts.items() if _MESSAGES_OF_PYTHON.match(text)]


def _form(row: Mapping[str, Any], reading: Reading) -> tuple[str, ...]:
    forms = [form for form in _FORMS if all(name in row for name in form)]
    if len(forms) > 1:
        forms = [form for form in forms if all(name in reading.columns for name in form)] or forms
    if not forms and "text" in row:
        return ("text",)
    if not forms and all(name in row for name in PAIRED):
        raise TrainingError(
            "is a pair of a chosen and a rejected answer, which dpo learns from; finetune reads answers"
        )
    if len(forms) != 1:
        raise TrainingError(f"has the keys {show_value(list(row))}; {_EXPECTED}")
    return forms[0]


def _dialog(row: Mapping[str, Any], form: Sequence[str], reading: Reading) -> tuple[Messages, Plain | None]:
    if len(form) == 1:
        return read_messages(row[form[0]], form[0], reading.roles), None
    name, answer = form
    before, plain = _question(row, name, reading)
    completion = row[answer]
    dialog = _answered(before, _answer(completion, answer, reading))
    if plain is None or not isinstance(completion, str):
        return dialog, None
    return dialog, plain._replace(completion=completion)


def _question(row: Mapping[str, Any], name: str, reading: Reading) -> tuple[Messages, Plain | None]:
    """Return a prompt as messages with weight 0 and, if it is text, also as plain text."""
    said = row[name] if name in _DIALOGS else _messages_in(row[name], name)
    if said is not None:
        messages, weights = read_messages(said, name, reading.roles)
        if not messages or messages[-1]["role"] == ASSISTANT:
            raise TrainingError(f"{name} is {show_value(said)}; expected a list that ends with what is to be answered")
        pairs = zip(messages, weights, strict=True)
        return Messages(messages, [0.0 if message["role"] == ASSISTANT else weight for message, weight in pairs]), None
    prompt = text_of(row, name)
    context = text_of(row, "input") if name == "instruction" and row.get("input") is not None else ""
    question = {"role": USER, "content": f"{prompt}\n\n{context}" if context else prompt}
    return Messages([question], [0.0]), Plain(prompt, "", context if name == "instruction" else None)


def _messages_in(value: Any, name: str) -> Any:
    """Return a prompt or an answer if it consists of messages, parsed if they are JSON; None if it is text."""
    if not isinstance(value, str):
        return value if isinstance(value, list | tuple | Mapping) else None
    if not _LIST_OF_OBJECTS.match(value):
        return None
    try:
        items = parse_json(value)
    except NotJson as error:
        if _MESSAGES.match(value):
            raise TrainingError(f"{name} is {show_value(value)}, no JSON: {error}") from None
        return None
    are_messages = all(isinstance(item, dict) and ("role" in item or "from" in item) for item in items)
    return items if are_messages else None


def _answer(value: Any, name: str, reading: Reading) -> Messages:
    """Return an answer (text, one message, or a list of messages) as messages."""
    messages = _messages_in(value, name)
    if messages is None and isinstance(value, str):
        return _text_answer(value)
    if messages is None:
        raise TrainingError(f"{name} is {show_value(value)}; expected text, or a list of messages")
    if isinstance(messages, Mapping):
        fields = cast("Mapping[str, Any]", messages)
        if not isinstance(fields.get("role", fields.get("from")), list):  # a list: columns
            message, weight = read_message(fields, name, {**ROLES, **reading.roles})
            return Messages([message], [weight])
    return read_messages(messages, name, reading.roles)


def _text_answer(text: str) -> Messages:
    return Messages([{"role": ASSISTANT, "content": text}], [None])


def _answered(before: Messages, answer: Messages) -> Messages:
    """Join a prompt and its answer, which may repeat the whole prompt or its last message."""
    asked, said = before.messages, answer.messages
    has_system = bool(said) and said[0]["role"] == SYSTEM
    if has_system and said[1 : len(asked) + 1] == asked:  # repeats the prompt after a system message
        return Messages(said, [None, *before.weights, *answer.weights[len(asked) + 1 :]])
    without_system = len(asked) - 1 if asked[0]["role"] == SYSTEM else len(asked)
    repeated = next((n for n in (len(asked), without_system, 1) if n and asked[-n:] == said[:n]), 0)
    return Messages([*asked, *said[repeated:]], [*before.weights, *answer.weights[repeated:]])


def _with_common_prompt(row: Mapping[str, Any], names: Sequence[str], reading: Reading) -> tuple[Record, ...]:
    """Return the records of a pair whose answers include the prompt."""
    form = (*names, *PAIRED)
    texts = [row[name] for name in PAIRED]
    if all(isinstance(row[name], str) and _messages_in(row[name], name) is None for name in PAIRED):
        shared = commonprefix(texts)  # noqa: RUF071 - texts, not paths
        shared = shared[: max(shared.rfind(blank) for blank in " \n\t") + 1].rstrip(" ")  # at a word boundary
        if not shared:
            raise TrainingError(
                "chosen and rejected have no words in common at their beginning, which would be the prompt; write a "
                "prompt of their own"
            )
        question = Messages([{"role": USER, "content": shared}], [0.0])
        return tuple(
            _record(row, form, _answered(question, _text_answer(text[len(shared) :])),
                    Plain(shared, text[len(shared) :]), reading)
            for text in texts
        )  # fmt: skip
    chosen, rejected = (_answer(row[name], name, reading) for name in PAIRED)
    pairs = zip(chosen.messages, rejected.messages, strict=False)
    count = next(
        (i for i, (one, other) in enumerate(pairs) if one != other), min(map(len, (chosen.messages, rejected.messages)))
    )
    if not count and names:
        before, _ = _question(row, names[0], reading)
        return tuple(_record(row, form, _answered(before, answer), None, reading) for answer in (chosen, rejected))
    if not count or count == min(len(chosen.messages), len(rejected.messages)):
        raise TrainingError(
            "chosen and rejected, without a prompt, are to begin with the same messages and to end with different ones"
        )
    records: list[Record] = []
    for messages, weights in (chosen, rejected):
        records.append(_record(row, form, Messages(messages, [0.0] * count + weights[count:]), None, reading))
    return tuple(records)


def _unread(row: Mapping[str, Any], read: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in row if name not in read)


Understand = Callable[[Mapping[str, Any], Reading], tuple[Record, ...]]
"""`example_of`, `pair_of` or `prompt_of`."""
