"""Grammars that hold an answer to calls, as the Lark text that llguidance reads.

What they allow is what `parser` reads and `forms` writes, with arguments that follow the tools' schemas, in the
keywords that `sampling/grammar/json_schema.py` makes of them. JSON is llguidance's own matter (`%json`); values in
Python are written out by `python_values.py`.
"""

import json
from collections.abc import Callable, Collection, Iterable, Sequence

from llamarium.errors import ToolError
from llamarium.tokenizer.tools.definition import ToolDefinition
from llamarium.tokenizer.tools.forms import TOOL_CALL, ToolForm
from llamarium.tokenizer.tools.python_values import ArgumentRules, quoted

Note = Callable[[int, str, str], None]
"""Takes a tool's place, and the place and name of a keyword of its schema that is not held."""

_NO_BRACKET = r"~/[ \t\r\n]*[{\[](?s:.*)/"  # where a call could begin without a tag
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
        tools: Those that there are.
        form: How calls are written.
        only: The names of those of them that may be called; None is all.
        may_talk: The answer may also be text that does not look like a call; in Hermes' form calls may follow it.
        most: How many calls there may be.
        answer: The body of a rule that an answer may follow instead of all that.
        note: Is told what is not held.
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
    """Return how an answer begins that calls a tool of one of these names."""
    if form == "hermes":
        return (TOOL_CALL,)
    return tuple(f"[{name}(" if form == "pythonic" else "".join(_signs(name, "parameters")) for name in names)


def _signs(name: str, key: str) -> tuple[str, ...]:
    """Return how a call in JSON begins, in literals of their own: after `{"` the lexer takes no `{` back."""
    return "{", '"name"', ": ", f'"{name}"', ", ", f'"{key}"', ": "


def _call(i: int, tool: ToolDefinition, form: ToolForm, note: Note) -> list[str]:
    """Return the rules of one tool's calls, the first of them named after its place."""
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
    """Return the schema of a tool's arguments, spaced as models space JSON and not otherwise."""
    spacing = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return json.dumps({"type": "object", **tool.parameters, "x-guidance": spacing})
