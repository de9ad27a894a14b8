r"""Messages of dialogs as data sets have them: OpenAI's and TRL's, ShareGPT's, LLaMA-Factory's.

    {"role": "assistant", "content": "4"}                         {"from": "gpt", "value": "4"}
    {"role": "assistant", "tool_calls": [{"function": ...}]}      {"from": "function_call", "value": "{\"name\": ...}"}
    {"role": "tool", "content": "4"}                              {"from": "observation", "value": "4"}

Contents may be lists of parts of text. A key that is null is one that a message lacks; a null within a call's arguments
is a value. `weight` (a number from 0) or `train` (true or false) of the assistant's message says how much it is
learned.

Source: TRL's "Dataset formats", LLaMA-Factory's `data/README.md`, axolotl's `chat_template` data sets, and OpenAI's
format for fine-tuning, as of November 2026.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from llamarium.errors import TrainingError, escape, show_value
from llamarium.strict_json import NotJson, parse_json

USER, ASSISTANT, SYSTEM, TOOL = "user", "assistant", "system", "tool"
_CALL = "function_call"

ROLES: Mapping[str, str] = {
    "human": USER, "gpt": ASSISTANT, "chatgpt": ASSISTANT, "bot": ASSISTANT, "model": ASSISTANT,
    "observation": TOOL, "function_response": TOOL, "function": TOOL, "ipython": TOOL,
    "developer": SYSTEM, **{role: role for role in (USER, ASSISTANT, SYSTEM, TOOL, _CALL)},
}  # fmt: skip
"""The roles of messages by the names that data sets have for them."""

_OWN = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content", "thinking", "reasoning")
_NAMES = (("role", "content"), ("from", "value"))


class Messages(NamedTuple):
    """A dialog's messages, and how much each is learned: None where nothing says so."""

    messages: list[dict[str, Any]]
    weights: list[float | None]


def read_messages(value: Any, where: str, roles: Mapping[str, str]) -> Messages:
    """Return a dialog's messages in the form of chat templates; TrainingError with the path of what is wrong.

    `roles` are names of roles that the data has, besides `ROLES`, and what they are here.
    """
    value = from_json(value, where) if isinstance(value, str) and value.lstrip()[:1] in ("[", "{") else value
    if isinstance(value, Mapping):
        value = _by_row(cast("Mapping[str, Any]", value), where)
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise TrainingError(f"{where} is {show_value(value)}; expected a list of messages")
    known = {**ROLES, **roles} if roles else ROLES
    messages: list[dict[str, Any]] = []
    weights: list[float | None] = []
    for i, said in enumerate(cast("Sequence[Any]", value)):
        message, weight = read_message(said, f"{where}[{i}]", known)
        messages.append(message)
        weights.append(weight)
    return Messages(messages, weights)


def read_message(said: Any, where: str, roles: Mapping[str, str] = ROLES) -> tuple[dict[str, Any], float | None]:
    """Return one message and its weight; errors as `read_messages`."""
    if type(said) is dict and len(plain := cast("dict[str, Any]", said)) == 2:  # nearly all messages
        name, content = plain.get("role", plain.get("from")), plain.get("content", plain.get("value"))
        role = roles.get(name) if type(name) is str else None
        if role is not None and role != _CALL and type(content) is str:
            return {"role": role, "content": content}, None
    if not isinstance(said, Mapping):
        raise TrainingError(
            f"{where} is {show_value(said)}; expected an object with role and content, or from and value"
        )
    fields = {key: item for key, item in cast("Mapping[str, Any]", said).items() if item is not None}
    of_role, of_content = _NAMES["role" not in fields and "from" in fields]
    role = _role(fields.pop(of_role, None), of_role, where, roles)
    weight = _weight(fields, where)
    content = fields.pop(of_content, None)
    if role == _CALL:
        return {"role": ASSISTANT, "content": "", "tool_calls": _called(content, where), **fields}, weight
    message: dict[str, Any] = {"role": role}
    if content is not None:
        message["content"] = _plain_parts(content)
    if (calls := fields.pop("tool_calls", None)) not in (None, []):
        message["tool_calls"] = _calls(calls, f"{where}.tool_calls")
    if (call := fields.pop("function_call", None)) is not None:
        message["tool_calls"] = [_call(call, f"{where}.function_call")]
    if "content" not in message and "tool_calls" in message:
        message["content"] = ""
    if "content" not in message:
        raise TrainingError(f"{where} has no {of_content}; expected text")
    return {**message, **fields}, weight


def _role(name: Any, key: str, where: str, roles: Mapping[str, str]) -> str:
    """Return a message's role here. Templates may have roles of their own, which `role` names; `from` may not."""
    if not isinstance(name, str):
        raise TrainingError(f"{where}.{key} is {show_value(name)}; expected a role")
    role = roles.get(name, name)
    if key == "from" and role not in ROLES.values():
        raise TrainingError(
            f"{where}.{key} is {show_value(name)}; expected one of {', '.join(roles)} (--roles {escape(name)}=user "
            "reads it as another)"
        )
    return role


def from_json(text: str, where: str) -> Any:
    """Return what a cell of a table has as JSON; TrainingError for other texts."""
    try:
        return parse_json(text)
    except NotJson as error:
        raise TrainingError(f"{where} is {show_value(text)}, no JSON: {error}") from None


def other_keys(messages: Sequence[Mapping[str, Any]], read: frozenset[str]) -> set[str]:
    """Return the keys of a dialog's messages that a format does not read."""
    return {key for message in messages for key in message if key not in _OWN and key not in read}


def _by_row(columns: Mapping[str, Any], where: str) -> Any:
    """Return the messages of an Arrow column whose keys hold lists, as older versions of `datasets` write them."""
    lists = [value for value in columns.values() if value is not None]
    if not lists or not all(isinstance(value, list) and len(value) == len(lists[0]) for value in lists):
        raise TrainingError(f"{where} is {show_value(dict(columns))}; expected a list of messages")
    names = [name for name, value in columns.items() if value is not None]
    return [dict(zip(names, values, strict=True)) for values in zip(*lists, strict=True)]


def _weight(fields: dict[str, Any], where: str) -> float | None:
    """Take `weight` and `train` out of a message."""
    weight, trained = fields.pop("weight", None), fields.pop("train", None)
    if trained is not None and not isinstance(trained, bool):
        raise TrainingError(f"{where}.train is {show_value(trained)}; expected true or false")
    if weight is not None:
        weight = checked_weight(weight, f"{where}.weight")
    if trained is None:
        return weight
    return (1.0 if weight is None else weight) if trained else 0.0


def checked_weight(weight: Any, where: str) -> float:
    """Return a weight as a number; TrainingError unless it is finite and not below 0. A table's text is read, too."""
    if isinstance(weight, str):
        try:
            weight = float(weight)
        except ValueError:
            weight = None if weight == "" else weight
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not is_number or not (0 <= weight <= 1e6 and math.isfinite(weight)):
        raise TrainingError(f"{where} is {show_value(weight)}; expected a number from 0 to 1e6")
    return float(weight)


def _plain_parts(content: Any) -> Any:
    """Return a content, its parts without keys that are null."""
    if not isinstance(content, list):
        return content
    parts = cast("list[Any]", content)
    return [
        {key: item for key, item in cast("dict[str, Any]", part).items() if item is not None}
        if isinstance(part, dict)
        else part
        for part in parts
    ]


def _calls(value: Any, where: str) -> list[dict[str, Any]]:
    value = from_json(value, where) if isinstance(value, str) else value
    if not isinstance(value, list):
        raise TrainingError(f"{where} is {show_value(value)}; expected a list of calls")
    return [_call(call, f"{where}[{i}]") for i, call in enumerate(cast("list[Any]", value))]


def _called(value: Any, where: str) -> list[dict[str, Any]]:
    """Return the calls of a `function_call` message: an object with name and arguments, or several, mostly as text."""
    value = from_json(value, where) if isinstance(value, str) else value
    many = cast("list[Any]", value) if isinstance(value, list) else [value]
    return [_call(call, f"{where}[{i}]" if isinstance(value, list) else where) for i, call in enumerate(many)]


def _call(call: Any, where: str) -> dict[str, Any]:
    """Return one call in the form of OpenAI's API, without keys that are null outside of its arguments."""
    if not isinstance(call, Mapping):
        raise TrainingError(f"{where} is {show_value(call)}; expected an object with name and arguments")
    fields = {key: item for key, item in cast("Mapping[str, Any]", call).items() if item is not None}
    if "function" not in fields and "name" in fields:
        arguments = fields.pop("arguments", fields.pop("parameters", {}))
        outer = {key: fields[key] for key in ("id",) if key in fields}
        return {**outer, "type": "function", "function": {"name": fields["name"], "arguments": arguments}}
    function = fields.get("function")
    if isinstance(function, Mapping):
        inner = cast("Mapping[str, Any]", function)
        fields["function"] = {key: item for key, item in inner.items() if item is not None}
    return {"type": "function", **fields}
