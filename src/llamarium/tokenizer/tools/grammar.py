"""Grammars that constrain an answer to tool calls, as Lark text for llguidance.

They allow what `parser` parses and `forms` writes, with arguments that match the tools' schemas as far as
`sampling/grammar/json_schema.py` supports them. llguidance handles JSON itself (`%json`); `python_values.py` generates
rules for Python values.
"""

import json
from collections.abc import Callable, Collection, Iterable, Sequence

from llamarium.errors import ToolError
from llamarium.tokenizer.tools.definition import ToolDefinition
from llamarium.tokenizer.tools.forms import TOOL_CALL, ToolForm
from llamarium.tokenizer.tools.python_values import ArgumentRules, quoted

Note = Callable[[int, str, str], None]
"""A callback for schema keywords that are not enforced: index of the tool, path and name of the keyword."""

_NO_BRACKET = r"~/[ \t\r\n]*[{\[](?s:.*)/"  # excludes text that could be a call without a tag
_NO_TAG = r"~/(?s:.*)(<tool_call>|<\|python_tag\|>)(?s:.*)/"
_NO_PYTHON_TAG = r"~/(?s:.*)<\|python_tag\|>(?s:.*)/"
_TALK = f"TALK: /(?s:.*)/ & {_NO_BRACKET} & {_NO_TAG}"
_AROUND = {"hermes": ('"<tool_call>"', '"\\n<tool_call>"', ""), "pythonic": ('"["', '", "', '"]"')}
_OPENING = f"opening[lazy]: OPENING\nOPENING: /(?s:.*)<tool_call>/ & {_NO_BRACKET} & {_NO_PYTHON_TAG}"


def call_grammar(
    tools: Sequence[ToolDefinition],
    form: ToolForm,
    *,
    only: Collection[str] | None = None,
    may_talk: bool = False,
    most: int = 1,
    answer: str | None = None,
    note: Note = lambda i, place, keyword: None,
) -> str:
    """Return the grammar of an answer that calls tools.

    Args:
        tools: All tools.
        form: Format of the calls.
        only: Names of the tools that may be called; None for all.
        may_talk: Whether the answer may also be text that does not look like a call; in the Hermes format, calls may
            follow the text.
        most: Maximum number of calls.
        answer: Body of a rule for an answer without calls, which replaces free text.
        note: Called for each schema keyword that is not enforced.
    """
    chosen = [(i, tool) for i, tool in enumerate(tools) if only is None or tool.name in only]
    rules = [rule for i, tool in chosen for rule in _call(i, tool, form, note)]
    names = " | ".join(f"call_{i}" for i, _ in chosen)
    return "\n".join([*_start(form, may_talk, most, answer), f"call: {names}", *rules, ""])


def _start(form: ToolForm, may_talk: bool, most: int, answer: str | None) -> list[str]:
    before, separator, after = _AROUND.get(form, ("", '"; "', ""))
    more = f" ({separator} call){{0,{most - 1}}}" if most > 1 else ""
    calls = f"{before} call{more} {after}".strip()
    if answer is not None:
        return [f"start: answer | {calls}", f"answer: {answer}"]
    if not may_talk:
        return [f"start: {calls}"]
    if form == "hermes":
        return [f"start: TALK | opening call{more}", _TALK, _OPENING]
    return [f"start: TALK | {calls}", _TALK]


def openings(names: Iterable[str], form: ToolForm) -> tuple[str, ...]:
    """Return the beginnings of answers that call one of these tools."""
    if form == "hermes":
        return (TOOL_CALL,)
    return tuple(f"[{name}(" if form == "pythonic" else "".join(_signs(name, "parameters")) for name in names)


def _signs(name: str, key: str) -> tuple[str, ...]:
    """Return the beginning of a JSON call, in separate literals, because the lexer cannot split `{"` again."""
    return "{", '"name"', ": ", f'"{name}"', ", ", f'"{key}"', ": "


def _call(i: int, tool: ToolDefinition, form: ToolForm, note: Note) -> list[str]:
    """Return the rules for calls of a tool; the first one is `call_{i}`."""
    if form == "pythonic":
        arguments = ArgumentRules(f"args_{i}", tool.parameters, lambda place, keyword: note(i, place, keyword))
        try:
            start = arguments.keywords()
        except ToolError as error:
            raise error.inside(f"tools[{i}].function") from None
        return [f"call_{i}: {quoted(f'{tool.name}(')} {start} {quoted(')')}", *arguments.lines()]
    key, before, after = ("parameters", "", "") if form == "llama3_json" else ("arguments", "\n", "\n</tool_call>")
    brace, *signs = _signs(tool.name, key)
    opening = " ".join(map(quoted, (before + brace, *signs)))
    return [f"call_{i}: {opening} args_{i} {quoted('}' + after)}", f"args_{i}: %json {_schema(tool)}"]


def _schema(tool: ToolDefinition) -> str:
    """Return the schema of a tool's arguments, with the white space that models use in JSON and no other."""
    spacing = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return json.dumps({"type": "object", **tool.parameters, "x-guidance": spacing})
