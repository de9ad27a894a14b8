"""What a row of a data set is: an example, a pair of answers, or a prompt, in one of the forms that are in use.

| form              | fields of a row                                                     | for                      |
|-------------------|---------------------------------------------------------------------|--------------------------|
| dialog            | `messages`                                                          | finetune, dpo*, grpo     |
| ShareGPT          | `conversations`                                                     | finetune, dpo*, grpo     |
| prompt-completion | `prompt` and `completion`: texts, or lists of messages              | finetune                 |
| Alpaca            | `instruction` (with `input`) and `output`                           | finetune, dpo*           |
| text              | `text`; only where a row has no other form                          | finetune, pretrain       |
| preference        | `chosen` and `rejected`, with or without `prompt`: texts or messages | dpo                     |
| prompt            | `prompt`: a text, or messages                                       | grpo                     |

(*) with `chosen` and `rejected` instead of the last answer. Beside a form a row may have `system`, `tools` (or
`functions`; a list, or its JSON), `history` (Alpaca's earlier turns), `chat_template_kwargs` (of the template) and
`weight` (a number from 0). Other fields are not read.

Without a `prompt`, what both answers begin with is it: messages, or text up to the last blank.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os.path import commonprefix
from typing import Any, NamedTuple, cast

from llamarium.datasets.messages import (
    ASSISTANT,
    SYSTEM,
    USER,
    Messages,
    checked_weight,
    from_json,
    read_message,
    read_messages,
)
from llamarium.datasets.rows import Reading
from llamarium.errors import TrainingError, show_value
from llamarium.tokenizer.tools.definition import ToolDefinition, read_tools

_FORMS = (("messages",), ("conversations",), ("prompt", "completion"), ("instruction", "output"))
_PAIRED = ("chosen", "rejected")
_DIALOGS = ("messages", "conversations")
_BESIDE = ("system", "tools", "functions", "history", "chat_template_kwargs", "weight")
_NOTHING = Messages([], [])
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
    """A prompt and its completion as texts, where there is no dialog format: a base model goes on from the prompt.

    An Alpaca row has its instruction as the prompt, and its input.
    """

    prompt: str
    completion: str
    input: str | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """One example, or a prompt, as it is understood.

    Attributes:
        form: The first field of the row's form.
        messages: The dialog; empty for a text.
        weights: Of each message, in the loss; above 0 only for the assistant's.
        text: The text that is learned as a document, else None.
        plain: The row without a dialog format, or None if it is a dialog.
        tools: What the assistant may call.
        variables: Of the chat template.
        unread: Fields of the row that are not read.
    """

    form: str
    messages: Sequence[Mapping[str, Any]] = ()
    weights: Sequence[float] = ()
    text: str | None = None
    plain: Plain | None = None
    tools: tuple[ToolDefinition, ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict[str, Any])
    unread: tuple[str, ...] = ()


def example_of(row: Mapping[str, Any], reading: Reading) -> tuple[Record, ...]:
    """Return the one record of a row that is an example; TrainingError for others."""
    form = _form(row, reading)
    if form == ("text",):
        weight = _row_weight(row)
        return (Record("text", text=_text(row, "text"), weights=(weight,), unread=_unread(row, ("text", "weight"))),)
    dialog, plain = _dialog(row, form, reading)
    return (_record(row, form, dialog, plain, reading),)


def pair_of(row: Mapping[str, Any], reading: Reading) -> tuple[Record, ...]:
    """Return the two records of a row that is a pair, of which the answers are learned; TrainingError for others.

    A pair has one loss, so weights only say whether a message is learned, and one of the row is not read.
    """
    unread = ("weight",) if row.get("weight") is not None else ()
    records = _pair({name: value for name, value in row.items() if name != "weight"}, reading)
    return tuple(
        replace(record, weights=[float(weight > 0) for weight in record.weights], unread=(*record.unread, *unread))
        for record in records
    )


def _pair(row: Mapping[str, Any], reading: Reading) -> tuple[Record, ...]:
    if not all(name in row for name in _PAIRED):
        raise TrainingError(f"has the keys {show_value(list(row))}; {_EXPECTED_PAIR}")
    names = [name for name in ("prompt", *_DIALOGS, "instruction") if name in row]
    names = [name for name in names if name in reading.columns] or names
    if names == ["prompt", "messages"]:  # as in UltraFeedback, whose messages are the chosen dialog
        names = ["prompt"]
    if len(names) > 1:
        raise TrainingError(f"has the keys {show_value(list(row))}; {_EXPECTED_PAIR}")
    chosen, rejected = row["chosen"], row["rejected"]
    if not names or (names == ["prompt"] and isinstance(row["prompt"], str) and not isinstance(chosen, str)):
        return _with_common_prompt(row, names, reading)
    form = (names[0], *_PAIRED)
    before, plain = _question(row, names[0], reading)
    records: list[Record] = []
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        answered = _answer(answer, name, reading)
        text = answer if isinstance(answer, str) else None
        ends = plain._replace(completion=text) if plain is not None and text is not None else None
        records.append(_record(row, form, _followed(before, answered), ends, reading))
    return tuple(records)


def prompt_of(row: Mapping[str, Any], reading: Reading) -> tuple[Record, ...]:
    """Return the one record of a row that is to be answered; TrainingError for others.

    All other fields are the reward's.
    """
    names = [name for name in ("prompt", *_DIALOGS) if name in row]
    names = [name for name in names if name in reading.columns] or names
    answers = [name for name in ("completion", *_PAIRED, "output") if name in row]
    if len(names) != 1 or answers:
        raise TrainingError(f"has the keys {show_value(list(row))}; {_EXPECTED_PROMPT}")
    before, plain = _question(row, names[0], reading)
    return (replace(_record(row, (names[0],), before, plain, reading), unread=()),)


def _record(
    row: Mapping[str, Any], form: Sequence[str], dialog: Messages, plain: Plain | None, reading: Reading
) -> Record:
    """Return a dialog with what stands beside it in its row."""
    messages, given = dialog
    before = _before(row, reading)
    if before.messages and messages and messages[0]["role"] == SYSTEM and before.messages[0]["role"] == SYSTEM:
        raise TrainingError("has system, and a system message in the dialog; leave one of them out")
    if before.messages:
        messages, given = _followed(before, dialog)
    share = _row_weight(row)
    weights = [
        share * (1.0 if weight is None else weight) if message["role"] == ASSISTANT else 0.0
        for message, weight in zip(messages, given, strict=True)
    ]
    variables = row.get("chat_template_kwargs") or {}
    variables = from_json(variables, "chat_template_kwargs") if isinstance(variables, str) else variables
    if not isinstance(variables, Mapping):
        raise TrainingError(f"chat_template_kwargs is {show_value(variables)}; expected an object")
    extra = ("input",) if form[0] == "instruction" else ()
    return Record(
        form[0],
        messages,
        weights,
        plain=None if before.messages else plain,
        tools=_tools(row),
        variables=cast("Mapping[str, Any]", variables),
        unread=_unread(row, (*form, *extra, *_BESIDE)),
    )


def _form(row: Mapping[str, Any], reading: Reading) -> tuple[str, ...]:
    forms = [form for form in _FORMS if all(name in row for name in form)]
    if len(forms) > 1:
        forms = [form for form in forms if all(name in reading.columns for name in form)] or forms
    if not forms and "text" in row:
        return ("text",)
    if not forms and all(name in row for name in _PAIRED):
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
    dialog = _followed(before, _answer(completion, answer, reading))
    if plain is None or not isinstance(completion, str):
        return dialog, None
    return dialog, plain._replace(completion=completion)


def _question(row: Mapping[str, Any], name: str, reading: Reading) -> tuple[Messages, Plain | None]:
    """Return what is to be answered as messages, none of which is learned, and as a text if it is one."""
    value = row[name]
    if name in _DIALOGS or _is_dialog(value):
        messages = read_messages(value, name, reading.roles).messages
        if not messages or messages[-1]["role"] == ASSISTANT:
            raise TrainingError(f"{name} is {show_value(value)}; expected a list that ends with what is to be answered")
        return Messages(messages, [0.0] * len(messages)), None
    prompt = _text(row, name)
    context = _text(row, "input") if name == "instruction" and row.get("input") is not None else ""
    asked = {"role": USER, "content": f"{prompt}\n\n{context}" if context else prompt}
    return Messages([asked], [0.0]), Plain(prompt, "", context if name == "instruction" else None)


def _is_dialog(value: Any) -> bool:
    """Whether a prompt or an answer is messages rather than a text, also as the JSON of a table's cell."""
    if isinstance(value, str):
        return value.startswith(('[{"role"', '[{"from"', '[{"content"', '[{"value"'))
    return isinstance(value, list | tuple | Mapping)


def _answer(value: Any, name: str, reading: Reading) -> Messages:
    """Return an answer as messages: a text, one message, or a list of them."""
    if isinstance(value, str) and not _is_dialog(value):
        return Messages([{"role": ASSISTANT, "content": value}], [None])
    if isinstance(value, Mapping) and not isinstance(next(iter(value.values()), None), list):
        message, weight = read_message(cast("Mapping[str, Any]", value), name)
        return Messages([message], [weight])
    if not isinstance(value, str | list | Mapping):
        raise TrainingError(f"{name} is {show_value(value)}; expected text, or a list of messages")
    return read_messages(value, name, reading.roles)


def _followed(before: Messages, answer: Messages) -> Messages:
    return Messages([*before.messages, *answer.messages], [*before.weights, *answer.weights])


def _with_common_prompt(row: Mapping[str, Any], names: Sequence[str], reading: Reading) -> tuple[Record, ...]:
    """Return the records of a pair whose answers have the prompt in them."""
    form = (*names, *_PAIRED)
    texts = [row[name] for name in _PAIRED]
    if all(isinstance(text, str) and not _is_dialog(text) for text in texts):
        shared = commonprefix(texts)  # noqa: RUF071 - texts, not paths
        shared = shared[: max(shared.rfind(blank) for blank in " \n\t") + 1].rstrip(" ")  # no word is cut in two
        if not shared:
            raise TrainingError(
                "chosen and rejected have no words in common at their beginning, which would be the prompt; write a "
                "prompt of their own"
            )
        asked = Messages([{"role": USER, "content": shared}], [0.0])
        return tuple(
            _record(row, form, _followed(asked, _answer(text[len(shared) :], name, reading)),
                    Plain(shared, text[len(shared) :]), reading)
            for name, text in zip(_PAIRED, texts, strict=True)
        )  # fmt: skip
    chosen, rejected = (_answer(row[name], name, reading) for name in _PAIRED)
    pairs = zip(chosen.messages, rejected.messages, strict=False)
    count = next(
        (i for i, (one, other) in enumerate(pairs) if one != other), min(map(len, (chosen.messages, rejected.messages)))
    )
    if not count and names:
        before, _ = _question(row, names[0], reading)
        return tuple(_record(row, form, _followed(before, answer), None, reading) for answer in (chosen, rejected))
    if not count or count == min(len(chosen.messages), len(rejected.messages)):
        raise TrainingError(
            "chosen and rejected, without a prompt, are to begin with the same messages and to end with different ones"
        )
    records: list[Record] = []
    for messages, weights in (chosen, rejected):
        records.append(_record(row, form, Messages(messages, [0.0] * count + weights[count:]), None, reading))
    return tuple(records)


# --- beside a form ----------------------------------------------------------------------------------------------------


def _before(row: Mapping[str, Any], reading: Reading) -> Messages:
    """Return the messages of `system` and `history`."""
    if not row.get("system") and not row.get("history"):
        return _NOTHING
    messages: list[dict[str, Any]] = []
    if row.get("system"):
        messages.append({"role": SYSTEM, "content": _text(row, "system")})
    history = row.get("history") or []
    history = from_json(history, "history") if isinstance(history, str) else history
    for i, turn in enumerate(cast("list[Any]", history) if isinstance(history, list) else [history]):
        if not isinstance(turn, list | tuple) or len(cast("list[Any]", turn)) != 2:
            raise TrainingError(f"history[{i}] is {show_value(turn)}; expected a question and its answer, both texts")
        asked, answered = cast("list[Any]", turn)
        messages += [{"role": USER, "content": asked}, {"role": ASSISTANT, "content": answered}]
    return Messages(messages, [None] * len(messages))


def _tools(row: Mapping[str, Any]) -> tuple[ToolDefinition, ...]:
    names = [name for name in ("tools", "functions") if row.get(name)]
    if not names:
        return ()
    value = row[names[0]]
    value = from_json(value, names[0]) if isinstance(value, str) else value
    if not isinstance(value, list):
        raise TrainingError(f"{names[0]} is {show_value(value)}; expected a list, or its JSON")
    return read_tools([_wrapped(tool) for tool in cast("list[Any]", value)], names[0])


def _wrapped(tool: Any) -> Any:
    """Return a tool in the form of OpenAI's API; functions may stand bare, as in LLaMA-Factory's data."""
    is_bare = isinstance(tool, Mapping) and "function" not in tool and "name" in tool
    return {"type": "function", "function": tool} if is_bare else tool


def _row_weight(row: Mapping[str, Any]) -> float:
    return checked_weight(row["weight"], "weight") if row.get("weight") is not None else 1.0


def _unread(row: Mapping[str, Any], read: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in row if name not in read)


def _text(row: Mapping[str, Any], name: str) -> str:
    value = row[name]
    if not isinstance(value, str):
        raise TrainingError(f"{name} is {show_value(value)}; expected text")
    return value


Understand = Callable[[Mapping[str, Any], Reading], tuple[Record, ...]]
"""`example_of`, `pair_of` or `prompt_of`."""
