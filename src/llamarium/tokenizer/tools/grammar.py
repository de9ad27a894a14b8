"""Grammars that hold an answer to calls, as the Lark text that llguidance reads.

What they allow is what `parser` reads and `forms` writes, with arguments that follow the tools' schemas. JSON is
llguidance's own matter (`%json`), which refuses the keywords of a schema that it does not know how to hold; values in
Python are written out here, from fewer keywords.
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, cast

from llamarium.errors import ToolError, show_value
from llamarium.tokenizer.tools.definition import ToolDefinition
from llamarium.tokenizer.tools.forms import TOOL_CALL, ToolForm, check_keyword

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
) -> str:
    """Return the grammar of an answer that calls tools.

    Args:
        tools: Those that there are.
        form: How calls are written.
        only: The names of those of them that may be called; None is all.
        may_talk: The answer may also be text that does not look like a call; in Hermes' form calls may follow it.
        most: How many calls there may be.
        answer: The body of a rule that an answer may follow instead of all that.
    """
    chosen = [(i, tool) for i, tool in enumerate(tools) if only is None or tool.name in only]
    rules = [rule for i, tool in chosen for rule in _call(i, tool, form)]
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
    brace, *signs = _signs(tool.name, key)
    opening = " ".join(map(quoted, (before + brace, *signs)))
    return [f"call_{i}: {opening} args_{i} {quoted('}' + after)}", f"args_{i}: %json {_schema(tool)}"]


def _schema(tool: ToolDefinition) -> str:
    """Return the schema of a tool's arguments, spaced as models space JSON and not otherwise."""
    spacing = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return json.dumps({"type": "object", **tool.parameters, "x-guidance": spacing})


_NOTES = ("title", "description", "default", "examples", "deprecated", "$comment", "$schema")  # they hold nothing
_HELD = ("type", "properties", "required", "additionalProperties", "items", "enum", "const", "anyOf")
_TEXT = r"""/'([^'\\\x00-\x1f\x7f]|\\['"\\nrt])*'|"([^"\\\x00-\x1f\x7f]|\\['"\\nrt])*"/"""
MAX_OPTIONAL = 400
"""How many members of an object may be left out: llguidance's parser follows each of them at the object's beginning."""
_SCALARS = {
    "string": _TEXT,
    "integer": "/-?(0|[1-9][0-9]{0,39})/",  # bounded, so that floating-point numbers hold it
    "number": r"/-?(0|[1-9][0-9]{0,39})(\.[0-9]{1,40})?([eE][+-]?[0-9]{1,2})?/",
    "boolean": '("True" | "False")',
    "null": '"None"',
}


def quoted(text: str) -> str:
    """Return a text as a string literal of Lark's grammar."""
    return json.dumps(text, ensure_ascii=False)


class ArgumentRules:
    """The rules of one tool's arguments, whose names begin alike."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._rules: list[str] = []
        self._any: str | None = None

    def lines(self) -> list[str]:
        """Return the rules, one a line."""
        return [f"{self._name}_{i}: {rule}" for i, rule in enumerate(self._rules)]

    def keywords(self, schema: Mapping[str, Any]) -> str:
        """Return the name of the rule of `a='x', b=1`."""
        _check_keywords(schema, "parameters")
        return self._members(schema, "parameters", lambda key: f"{check_keyword(key)}=")

    def _add(self, rule: str) -> str:
        self._rules.append(rule)
        return f"{self._name}_{len(self._rules) - 1}"

    def _members(self, schema: Mapping[str, Any], where: str, spell: Callable[[str], str]) -> str:
        """Return a rule of what an object holds, in the schema's order.

        It is put together from the end: `first` is what can stand from a member on if nothing stands before it, and
        `rest` if something does, so that there is a comma.
        """
        required: Sequence[str] = schema.get("required", [])
        properties: Mapping[str, object] = schema.get("properties", {})
        members = {**properties, **{name: True for name in required if name not in properties}}
        if len(members) > len(properties) and schema.get("additionalProperties") is False:
            extra = [name for name in required if name not in properties]
            raise ToolError(f"{where}.required", f"names {show_value(extra)}, which additionalProperties forbids")
        if len(members) - len(set(required)) > MAX_OPTIONAL:
            raise ToolError(f"{where}.properties", f"has more than {MAX_OPTIONAL} members that may be left out")
        first = rest = '""'
        for key, given in reversed(members.items()):
            value = self.value(given, f"{where}.properties.{key}")
            item = self._add(f"{quoted(spell(key))} {value}")
            is_required = key in required
            first = self._add(f"{item} {rest}" if is_required else f"{item} {rest} | {first}")
            rest = self._add(f'", " {item} {rest}' if is_required else f'(", " {item})? {rest}')
        return first

    def value(self, schema: object, where: str) -> str:
        """Return the name of the rule of a value."""
        if schema is True:
            return self._anything()
        if not isinstance(schema, Mapping):
            raise ToolError(where, f"is {show_value(schema)}, which the pythonic form does not hold")
        given = cast("Mapping[str, Any]", schema)
        _check_keywords(given, where)
        if "enum" in given or "const" in given:
            values = cast("Sequence[object]", given["enum"] if "enum" in given else [given["const"]])
            return self._add(" | ".join(quoted(repr(value)) for value in values))
        if "anyOf" in given:
            some = enumerate(cast("Sequence[object]", given["anyOf"]))
            return self._add(" | ".join(self.value(one, f"{where}.anyOf[{i}]") for i, one in some))
        named = given.get("type", "object" if "properties" in given else "array" if "items" in given else None)
        if named is None:
            return self._anything()
        types = cast("Sequence[str]", named if isinstance(named, list) else [named])
        return self._add(" | ".join(self._typed(one, given, where) for one in types))

    def _typed(self, name: str, schema: Mapping[str, Any], where: str) -> str:
        if name == "array":
            item = self.value(schema.get("items", True), f"{where}.items")
            return f'"[" ({item} (", " {item})*)? "]"'
        if name == "object":
            if not schema.get("properties") and schema.get("additionalProperties", True):
                return self._mapping(self._anything())
            members = self._members(schema, where, lambda key: f"{key!r}: ")
            return f'"{{" {members} "}}"'
        return _SCALARS[name]

    def _anything(self) -> str:
        if self._any is None:
            self._any = self._add("")
            scalars = " | ".join(_SCALARS.values())
            place = int(self._any.rpartition("_")[2])
            listed = f'"[" ({self._any} (", " {self._any})*)? "]"'
            self._rules[place] = f"{scalars} | {listed} | {self._mapping(self._any)}"
        return self._any

    def _mapping(self, value: str) -> str:
        member = f'{_TEXT} ": " {value}'
        return f'"{{" ({member} (", " {member})*)? "}}"'


def _check_keywords(schema: Mapping[str, Any], where: str) -> None:
    for keyword in schema:
        if keyword not in _HELD and keyword not in _NOTES:
            raise ToolError(f"{where}.{keyword}", "is a keyword that the pythonic form does not hold; use llama3_json")
    if not isinstance(schema.get("additionalProperties", True), bool):
        raise ToolError(f"{where}.additionalProperties", "is a schema, which the pythonic form does not hold")
    alone = [keyword for keyword in ("enum", "const", "anyOf") if keyword in schema]
    others = [keyword for keyword in schema if keyword in _HELD and keyword not in (*alone, "type")]
    if len(alone) > 1 or (alone and others) or ("anyOf" in schema and "type" in schema):
        raise ToolError(where, f"joins {show_value([*alone, *others])}, which the pythonic form does not hold")
