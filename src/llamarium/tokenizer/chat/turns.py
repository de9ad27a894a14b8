"""Validate a dialog's messages and turn them into role, content and calls."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

from llamarium.errors import ChatFormatError, ToolError, show_value, warn_caller
from llamarium.tokenizer.chat.content import check_parts, joined
from llamarium.tokenizer.tools.definition import ToolCall, ToolDefinition, read_calls
from llamarium.tokenizer.tools.forms import ToolForm, Turn, introduce, join_results, write_calls

ROLES = ("system", "user", "assistant", "tool")
_KEYS = {"assistant": ("role", "content", "tool_calls"), "tool": ("role", "content", "tool_call_id")}


def read_turns(messages: object, tools: Sequence[ToolDefinition] = (), form: ToolForm = "llama3_json") -> list[Turn]:
    """Return the turns of a dialog as `ChatFormat.encode` takes it, with tool definitions added."""
    read = [_read_message(message, i) for i, message in enumerate(check_list(messages))]
    if not tools and not any(message.get("tool_calls") or message["role"] == "tool" for message in read):
        return [Turn(message["role"], message["content"] or "", "") for message in read]
    calls = [call_list(message, i) for i, message in enumerate(read)]
    order = order_of_results(read, calls)
    turns = [Turn(read[i]["role"], read[i]["content"] or "", _write(calls[i], form, i)) for i in order]
    turns = join_results(turns, form) if tools or any(calls) else turns
    return introduce(turns, tools, form) if tools else turns


def check_list(messages: object) -> Sequence[object]:
    """Return the messages; ChatFormatError if they are not a list, or empty."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ChatFormatError(
            f"a dialog is {show_value(messages)}; expected a list of at least one message, each "
            '{"role": ..., "content": ...}'
        )
    return cast("Sequence[object]", messages)


def call_list(message: Mapping[str, Any], i: int) -> tuple[ToolCall, ...]:
    """Return the calls of message `i`; errors as `read_calls`."""
    return read_calls(message.get("tool_calls"), f"messages[{i}].tool_calls")


def order_of_results(messages: Sequence[Mapping[str, Any]], calls: Sequence[Sequence[ToolCall]]) -> list[int]:
    """Return the indices of the messages, with the results of calls in the order of the calls.

    The text of a dialog has no ids, so only the order tells the model which result belongs to which call. So if ids are
    given, either all calls of a turn must have a result, or none.

    Raises:
        ToolError: If a result refers to no call, to a call with a result, or if a call has no result.
    """
    places: list[tuple[int, int]] = []  # index of the turn that a message belongs to, and its place within it
    call_ids: list[str] = []
    answered: set[str] = set()
    start = 0
    for i, message in enumerate(messages):
        if message["role"] != "tool":
            _check_answered(call_ids, answered, start)
            call_ids, answered, start = _ids(calls[i], i), set(), i
            places.append((i, -1))
            continue
        answers = message.get("tool_call_id")
        if answers is None:
            places.append((start, len(call_ids)))
            continue
        if answers not in call_ids or answers in answered:
            problem = (
                "has a result already"
                if answers in call_ids
                else f"is not the id of a preceding call, {show_value(call_ids)}"
            )
            raise ToolError(f"messages[{i}].tool_call_id", f"is {show_value(answers)}, which {problem}")
        answered.add(answers)
        places.append((start, call_ids.index(answers)))
    _check_answered(call_ids, answered, start)
    return sorted(range(len(messages)), key=lambda i: places[i])


def _ids(calls: Sequence[ToolCall], i: int) -> list[str]:
    """Return the ids of a message's calls; ToolError if two are equal."""
    ids = [call.id for call in calls]
    for k, call_id in enumerate(ids):
        if call_id and call_id in ids[:k]:
            raise ToolError(f"messages[{i}].tool_calls[{k}].id", f"is {show_value(call_id)}, which another call has")
    return ids


def _check_answered(call_ids: Sequence[str], answered: Collection[str], i: int) -> None:
    for k, call_id in enumerate(call_ids):
        if answered and call_id not in answered:
            raise ToolError(
                f"messages[{i}].tool_calls[{k}].id",
                f"is {show_value(call_id)}, which has no result, although other calls of the message have one; add it",
            )


def _write(calls: Sequence[ToolCall], form: ToolForm, i: int) -> str:
    try:
        return write_calls(calls, form)
    except ToolError as error:
        raise error.inside(f"messages[{i}]") from None


def _read_message(message: object, i: int) -> Mapping[str, Any]:
    if not isinstance(message, Mapping):
        raise ChatFormatError(f"messages[{i}] is {show_value(message)}; expected an object with role and content")
    fields = cast("Mapping[str, Any]", message)
    role, content = fields.get("role"), fields.get("content")
    if role not in ROLES:
        raise ChatFormatError(f"messages[{i}].role is {show_value(role)}; expected {', '.join(ROLES)}")
    if not isinstance(content, str):
        check_parts(content, f"messages[{i}].content")
        content = joined(content)
    if not isinstance(content, str) and not (content is None and fields.get("tool_calls")):
        raise ChatFormatError(f"messages[{i}].content is {type(content).__name__}; expected text (str)")
    known_keys = _KEYS.get(role, ("role", "content"))
    if misplaced := [key for key in ("tool_calls", "tool_call_id") if key not in known_keys and fields.get(key)]:
        raise ChatFormatError(f"messages[{i}] has {misplaced[0]}, which the role {role} does not have")
    if unread := [key for key, value in fields.items() if key not in known_keys and value is not None]:
        warn_caller(f"messages[{i}]: this chat format ignores {show_value(unread)} of the role {role}")
    return {**{key: fields[key] for key in known_keys if key in fields}, "content": content}
