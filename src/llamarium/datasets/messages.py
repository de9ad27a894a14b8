r"""Parsing of dialog messages in the formats of OpenAI, TRL, ShareGPT and LLaMA-Factory.

    {"role": "assistant", "content": "4"}                         {"from": "gpt", "value": "4"}
    {"role": "assistant", "tool_calls": [{"function": ...}]}      {"from": "function_call", "value": "{\"name\": ...}"}
    {"role": "tool", "content": "4"}                              {"from": "observation", "value": "4"}

Contents may be lists of text parts. Keys with null are treated as missing, except in a call's arguments. `weight` (a
number from 0) or `train` (true or false) of an assistant's message is its weight in the loss.

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
"""Roles of messages, by the names that data sets use for them."""

_OWN = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content", "thinking", "reasoning")
_NAMES = (("role", "content"), ("from", "value"))


class Messages(NamedTuple):
    """The messages of a dialog and their loss weights; None for messages without a given weight."""

    messages: list[dict[str, Any]]
    weights: list[float | None]


def read_messages(value: Any, where: str, roles: Mapping[str, str]) -> Messages:
    """Parse a dialog's messages into the form of chat templates; TrainingError names the path of an invalid part.

    `roles` maps additional names of roles in the data to roles.
    """
    value = from_json(value, where) if isinstance(value, str) and value.lstrip()[:1] in ("[", "{") else value
    if isinstance(value, Mapping):
        value = _by_row(cast("Mapping[str, Any]", value), where)
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise TrainingError(f"{where} is {show_value(value)}; expected a list of messages")
    all_roles = {**ROLES, **roles} if roles else ROLES
    messages: list[dict[str, Any]] = []
    weights: list[float | None] = []
    for i, said in enumerate(cast("Sequence[Any]", value)):
        message, weight = read_message(said, f"{where}[{i}]", all_roles)
        messages.append(message)
        weights.append(weight)
    return Messages(messages, weights)


def read_message(said: Any, where: str, roles: Mapping[str, str] = ROLES) -> tuple[dict[str, Any], float | None]:
    """Parse one message; return it and its weight. Raises as `read_messages`."""
    if type(said) is dict and len(plain := cast("dict[str, Any]", said)) == 2:  # fast path for nearly all messages
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
    """Return a message's role; unknown ones are allowed in `role`, as a template may define them, but not in `from`."""
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
    """Parse the JSON in a table's cell; TrainingError if it is not JSON."""
    try:
        return parse_json(text)
    except NotJson as error:
        raise TrainingError(f"{where} is {show_value(text)}, no JSON: {error}") from None


def other_keys(messages: Sequence[Mapping[str, Any]], read: frozenset[str]) -> set[str]:
    """Return the keys of a dialog's messages that neither this module nor the dialog format reads."""
    return {key for message in messages for key in message if key not in _OWN and key not in read}


def _by_row(columns: Mapping[str, Any], where: str) -> Any:
    """Convert an object of lists, as older versions of `datasets` return it, to a list of messages."""
    lists = [value for value in columns.values() if value is not None]
    if not lists or not all(isinstance(value, list) and len(value) == len(lists[0]) for value in lists):
        raise TrainingError(f"{where} is {show_value(dict(columns))}; expected a list of messages")
    names = [name for name, value in columns.items() if value is not None]
    return [dict(zip(names, values, strict=True)) for values in zip(*lists, strict=True)]


def _weight(fields: dict[str, Any], where: str) -> float | None:
    """Remove `weight` and `train` from a message, and return its weight."""
    weight, trained = fields.pop("weight", None), fields.pop("train", None)
    if trained is not None and not isinstance(trained, bool):
        raise TrainingError(f"{where}.train is {show_value(trained)}; expected true or false")
    if weight is not None:
        weight = checked_weight(weight, f"{where}.weight")
    if trained is None:
        return weight
    return (1.0 if weight is None else weight) if trained else 0.0


def checked_weight(weight: Any, where: str) -> float:
    """Return a weight, a number or its text, as a float; TrainingError if it is not between 0 and 1e6."""
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
    """Return a message's content; parts are returned without keys that are null."""
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
    """Return the calls of a `function_call` message: objects with name and arguments, usually as JSON."""
    value = from_json(value, where) if isinstance(value, str) else value
    many = cast("list[Any]", value) if isinstance(value, list) else [value]
    return [_call(call, f"{where}[{i}]" if isinstance(value, list) else where) for i, call in enumerate(many)]


def _call(call: Any, where: str) -> dict[str, Any]:
    """Return a call in the form of OpenAI's API, without null keys outside its arguments."""
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
