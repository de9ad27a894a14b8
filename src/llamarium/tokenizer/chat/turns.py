"""A dialog's messages as checked turns: role, content and calls."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

from llamarium.errors import ChatFormatError, ToolError, show_value, warn_caller
from llamarium.tokenizer.chat.content import check_parts, joined
from llamarium.tokenizer.tools.definition import ToolCall, ToolDefinition, read_calls
from llamarium.tokenizer.tools.forms import ToolForm, Turn, introduce, join_results, write_calls

ROLES = ("system", "user", "assistant", "tool")
_KEYS = {"assistant": ("role", "content", "tool_calls"), "tool": ("role", "content", "tool_call_id")}


def read_turns(messages: object, tools: Sequence[ToolDefinition] = (), form: ToolForm = "llama3_json") -> list[Turn]:
    """Return the turns of a dialog as `ChatFormat.encode` takes it, tools described in them."""
    read = [_read_message(message, i) for i, message in enumerate(check_list(messages))]
    if not tools and not any(message.get("tool_calls") or message["role"] == "tool" for message in read):
        return [Turn(message["role"], message["content"] or "", "") for message in read]
    calls = [call_list(message, i) for i, message in enumerate(read)]
    order = order_of_results(read, calls)
    turns = [Turn(read[i]["role"], read[i]["content"] or "", _write(calls[i], form, i)) for i in order]
    turns = join_results(turns, form) if tools or any(calls) else turns
    return introduce(turns, tools, form) if tools else turns


def check_list(messages: object) -> Sequence[object]:
    """Return the messages; ChatFormatError if they are no list, or an empty one."""
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
    """Return the messages' places with the results of calls in the order of the calls.

    Text has no ids: for a model the order alone says which result is of which call. So where ids are given, either all
    calls of a turn have a result, or none has.
    """
    places: list[tuple[int, int]] = []  # of the turn that a message belongs to, and within it
    made: list[str] = []
    answered: set[str] = set()
    start = 0
    for i, message in enumerate(messages):
        if message["role"] != "tool":
            _check_answered(made, answered, start)
            made, answered, start = _ids(calls[i], i), set(), i
            places.append((i, -1))
            continue
        answers = message.get("tool_call_id")
        if answers is None:
            places.append((start, len(made)))
            continue
        if answers not in made or answers in answered:
            problem = (
                "has a result already" if answers in made else f"is none of the calls before it, {show_value(made)}"
            )
            raise ToolError(f"messages[{i}].tool_call_id", f"is {show_value(answers)}, which {problem}")
        answered.add(answers)
        places.append((start, made.index(answers)))
    _check_answered(made, answered, start)
    return sorted(range(len(messages)), key=lambda i: places[i])


def _ids(calls: Sequence[ToolCall], i: int) -> list[str]:
    """Return the ids of a message's calls, which differ where there are any."""
    ids = [call.id for call in calls]
    for k, call_id in enumerate(ids):
        if call_id and call_id in ids[:k]:
            raise ToolError(f"messages[{i}].tool_calls[{k}].id", f"is {show_value(call_id)}, as that of another call")
    return ids


def _check_answered(made: Sequence[str], answered: Collection[str], i: int) -> None:
    for k, call_id in enumerate(made):
        if answered and call_id not in answered:
            raise ToolError(
                f"messages[{i}].tool_calls[{k}].id",
                f"is {show_value(call_id)}, which has no result, unlike others beside it; give it one",
            )


def _write(calls: Sequence[ToolCall], form: ToolForm, i: int) -> str:
    try:
        return write_calls(calls, form)
    except ToolError as error:
        raise error.inside(f"messages[{i}]") from None


def _read_message(message: object, i: int) -> Mapping[str, Any]:
    if not isinstance(message, Mapping):
        raise ChatFormatError(f"messages[{i}] is {show_value(message)}; expected an object with role and content")
    given = cast("Mapping[str, Any]", message)
    role, content = given.get("role"), given.get("content")
    if role not in ROLES:
        raise ChatFormatError(f"messages[{i}].role is {show_value(role)}; expected {', '.join(ROLES)}")
    if not isinstance(content, str):
        check_parts(content, f"messages[{i}].content")
        content = joined(content)
    if not isinstance(content, str) and not (content is None and given.get("tool_calls")):
        raise ChatFormatError(f"messages[{i}].content is {type(content).__name__}; expected text (str)")
    known = _KEYS.get(role, ("role", "content"))
    if misplaced := [key for key in ("tool_calls", "tool_call_id") if key not in known and given.get(key)]:
        raise ChatFormatError(f"messages[{i}] has {misplaced[0]}, which the role {role} does not have")
    if unread := [key for key, value in given.items() if key not in known and value is not None]:
        warn_caller(f"messages[{i}]: this dialog format does not read {show_value(unread)} of the role {role}")
    return {**{key: given[key] for key in known if key in given}, "content": content}
