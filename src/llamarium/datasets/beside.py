"""Additional fields of a row: system message, earlier turns, tools and weight."""

from collections.abc import Mapping
from typing import Any, cast

from llamarium.datasets.messages import ASSISTANT, SYSTEM, USER, Messages, checked_weight, from_json
from llamarium.errors import ToolError, TrainingError, show_value
from llamarium.tokenizer.tools.definition import ToolDefinition, read_tools

BESIDE = ("system", "tools", "functions", "history", "chat_template_kwargs", "weight")
"""Additional fields that a row of any form may have."""


def earlier_messages(row: Mapping[str, Any]) -> Messages:
    """Return the messages of the fields `system` and `history`."""
    messages: list[dict[str, Any]] = []
    if row.get("system"):
        messages.append({"role": SYSTEM, "content": text_of(row, "system")})
    history = row.get("history") or []
    history = from_json(history, "history") if isinstance(history, str) else history
    for i, turn in enumerate(cast("list[Any]", history) if isinstance(history, list) else [history]):
        if not isinstance(turn, list | tuple) or len(cast("list[Any]", turn)) != 2:
            raise TrainingError(f"history[{i}] is {show_value(turn)}; expected a question and its answer, both texts")
        asked, answered = cast("list[Any]", turn)
        messages += [{"role": USER, "content": asked}, {"role": ASSISTANT, "content": answered}]
    return Messages(messages, [None] * len(messages))


def with_earlier(earlier: Messages, dialog: Messages) -> Messages:
    """Insert earlier messages at the beginning of a dialog, after its system message.

    TrainingError if both have different system messages.
    """
    if not earlier.messages or not dialog.messages:
        return earlier if earlier.messages else dialog
    (messages, weights), count = dialog, int(dialog.messages[0]["role"] == SYSTEM)
    if count and earlier.messages[0]["role"] == SYSTEM:
        if earlier.messages[0] != messages[0]:
            raise TrainingError("has system, and a system message in the dialog; leave one of them out")
        messages, weights, count = messages[1:], weights[1:], 0
    return Messages(
        [*messages[:count], *earlier.messages, *messages[count:]],
        [*weights[:count], *earlier.weights, *weights[count:]],
    )


def tools_of(row: Mapping[str, Any]) -> tuple[tuple[ToolDefinition, ...], tuple[str, ...]]:
    """Return the tools of a row, and labels of those that are ignored because they are not valid functions."""
    names = [name for name in ("tools", "functions") if row.get(name)]
    if not names:
        return (), ()
    value = row[names[0]]
    value = from_json(value, names[0]) if isinstance(value, str) else value
    if value is None:  # JSON's null
        return (), ()
    value = [value] if isinstance(value, Mapping) else value
    if not isinstance(value, list):
        raise TrainingError(f"{names[0]} is {show_value(value)}; expected a list, or its JSON")
    tools = [_wrapped(tool) for tool in cast("list[Any]", value)]
    try:
        return read_tools(tools, names[0]), ()
    except ToolError:
        return _usable_tools(tools, names[0])


def _usable_tools(tools: list[Any], where: str) -> tuple[tuple[ToolDefinition, ...], tuple[str, ...]]:
    """Read tools one by one, ignoring hosted tools, invalid ones, and further ones with the same name."""
    usable: dict[str, ToolDefinition] = {}
    left_out: dict[str, None] = {}
    for tool in tools:
        try:
            (definition,) = read_tools([tool], where)
        except ToolError:
            left_out[_label(tool, where)] = None
            continue
        if usable.setdefault(definition.name, definition) is not definition:
            left_out[f"{where}: a second {definition.name}"] = None
    return read_tools([*usable.values()], where), tuple(left_out)


def _label(tool: Any, where: str) -> str:
    if not isinstance(tool, Mapping):
        return f"{where}: {show_value(tool)}"
    fields = cast("Mapping[str, Any]", tool)
    if (kind := fields.get("type", "function")) != "function":
        return f"{where}: type {show_value(kind)}"
    function = fields.get("function")
    name = cast("Mapping[str, Any]", function).get("name") if isinstance(function, Mapping) else None
    return f"{where}: {show_value(name)}" if name is not None else f"{where}: a tool without a name"


def _wrapped(tool: Any) -> Any:
    """Return a tool in the form of OpenAI's API; functions may be unwrapped, as in LLaMA-Factory's data."""
    if not isinstance(tool, Mapping):
        return tool
    fields = cast("Mapping[str, Any]", tool)
    is_bare = "function" not in fields and "name" in fields and fields.get("type") in (None, "function")
    return {"type": "function", "function": fields} if is_bare else fields


def weight_of(row: Mapping[str, Any]) -> float:
    """Return a row's weight, 1 by default; TrainingError if it is invalid."""
    return checked_weight(row["weight"], "weight") if row.get("weight") is not None else 1.0


def text_of(row: Mapping[str, Any], name: str) -> str:
    """Return a field that must be text; TrainingError if it is not."""
    value = row[name]
    if not isinstance(value, str):
        raise TrainingError(f"{name} is {show_value(value)}; expected text")
    return value
