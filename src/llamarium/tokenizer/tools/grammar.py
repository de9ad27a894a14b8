"""Grammars that hold an answer to calls, as the Lark text that llguidance reads.

What they allow is what `parser` reads and `forms` writes, with arguments that follow the tools' schemas. JSON is
llguidance's own matter (`%json`), which refuses the keywords of a schema that it does not know how to hold; values in
Python are written out here, from fewer keywords (`pythonic_grammar`).
"""

import json
from collections.abc import Collection, Sequence

from llamarium.errors import ToolError
from llamarium.tokenizer.tools.definition import ToolDefinition
from llamarium.tokenizer.tools.forms import ToolForm
from llamarium.tokenizer.tools.pythonic_grammar import ArgumentRules, quoted

_NO_BRACKET = r"~/[ \t\r\n]*[{\[](?s:.*)/"  # where a call could begin without a tag
_NO_TAG = r"~/(?s:.*)(<tool_call>|<\|python_tag\|>)(?s:.*)/"
_NO_PYTHON_TAG = r"~/(?s:.*)<\|python_tag\|>(?s:.*)/"
_TALK = f"TALK: /(?s:.*)/ & {_NO_BRACKET} & {_NO_TAG}"
_OPENING = f"opening[lazy]: OPENING\nOPENING: /(?s:.*)<tool_call>/ & {_NO_BRACKET} & {_NO_PYTHON_TAG}"


def call_grammar(
    tools: Sequence[ToolDefinition],
    form: ToolForm,
    *,
    only: Collection[str] | None = None,
    may_talk: bool = False,
    parallel: bool = True,
) -> str:
    """Return the grammar of an answer that calls tools.

    Args:
        tools: Those that there are.
        form: How calls are written.
        only: The names of those of them that may be called; None is all.
        may_talk: The answer may also be text that does not look like a call; in Hermes' form calls may follow it.
        parallel: There may be several calls.
    """
    chosen = [(i, tool) for i, tool in enumerate(tools) if only is None or tool.name in only]
    rules = [rule for i, tool in chosen for rule in _call(i, tool, form)]
    names = " | ".join(f"call_{i}" for i, _ in chosen)
    return "\n".join([*_start(form, may_talk, parallel), f"call: {names}", *rules, ""])


def _start(form: ToolForm, may_talk: bool, parallel: bool) -> list[str]:
    """Return what an answer is made of."""
    if form == "hermes":
        more = ' ("\\n<tool_call>" call)*' if parallel else ""
        if may_talk:
            return [f"start: TALK | opening call{more}", _TALK, _OPENING]
        return [f'start: "<tool_call>" call{more}']
    separator, before, after = ('", "', '"[" ', ' "]"') if form == "pythonic" else ('"; "', "", "")
    calls = f"{before}call{f' ({separator} call)*' if parallel else ''}{after}"
    return [f"start: TALK | {calls}", _TALK] if may_talk else [f"start: {calls}"]


def _call(i: int, tool: ToolDefinition, form: ToolForm) -> list[str]:
    """Return the rules of one tool's calls, the first of them named after its place."""
    if form == "pythonic":
        arguments = ArgumentRules(f"args_{i}")
        try:
            start = arguments.keywords(tool.parameters)
        except ToolError as error:
            raise error.inside(f"tools[{i}].function") from None
        return [f"call_{i}: {quoted(f'{tool.name}(')} {start} {quoted(')')}", *arguments.lines()]
    key, before, after = ("parameters", "", "") if form == "llama3_json" else ("arguments", "\n", "\n</tool_call>")
    opening = f'{before}{{"name": "{tool.name}", "{key}": '
    return [f"call_{i}: {quoted(opening)} args_{i} {quoted('}' + after)}", f"args_{i}: %json {_schema(tool)}"]


def _schema(tool: ToolDefinition) -> str:
    """Return the schema of a tool's arguments, spaced as models space JSON and not otherwise."""
    spacing = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return json.dumps({"type": "object", **tool.parameters, "x-guidance": spacing})
