"""Rules of Lark for a tool's arguments as Python writes them, in calls such as `f(a='x', b=[1, 2])`.

Schemas come in the keywords that `sampling/grammar/json_schema.py` makes of them. Fewer are held here than in JSON:
types, lists of values, objects, arrays, `anyOf` and references. The others are noted.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

from llamarium.errors import ToolError
from llamarium.tokenizer.tools.forms import check_keyword

MAX_OPTIONAL = 400
"""How many members of an object may be left out: llguidance's parser follows each of them at the object's beginning."""

_TEXT = r"""/'([^'\\\x00-\x1f\x7f]|\\['"\\nrt])*'|"([^"\\\x00-\x1f\x7f]|\\['"\\nrt])*"/"""
_SCALARS = {
    "string": _TEXT,
    "integer": "/-?(0|[1-9][0-9]{0,39})/",  # bounded, so that floating-point numbers hold it
    "number": r"/-?(0|[1-9][0-9]{0,39})(\.[0-9]{1,40})?([eE][+-]?[0-9]{1,2})?/",
    "boolean": '("True" | "False")',
    "null": '"None"',
}
_PYTHON_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "null": (type(None),),
    "array": (list,), "object": (dict,),
}  # fmt: skip
_HELD = frozenset(
    ("type", "properties", "required", "additionalProperties", "items", "prefixItems", "minItems", "maxItems", "enum",
     "const", "anyOf", "$ref", "$defs")
)  # fmt: skip
_OF_OBJECTS = ("properties", "required", "additionalProperties")
_OF_ARRAYS = ("items", "prefixItems", "minItems", "maxItems")
_NO_RESTRICTIONS = frozenset(("title", "description", "default", "examples", "$comment", "$schema"))


def quoted(text: str) -> str:
    """Return a text as a string literal of Lark's grammar."""
    return json.dumps(text, ensure_ascii=False)


class ArgumentRules:
    """The rules of one tool's arguments, whose names begin alike.

    Args:
        name: What the names of the rules begin with.
        schema: Of the arguments, with what it refers to in `$defs`.
        note: Is told the place and the name of a keyword that is not held; "" is all of the schema.
    """

    def __init__(self, name: str, schema: Mapping[str, Any], note: Callable[[str, str], None]) -> None:
        self._name = name
        self._root = schema
        self._note = note
        self._rules: list[str] = []
        self._referred: dict[str, str | None] = {}
        self._any: str | None = None

    def lines(self) -> list[str]:
        """Return the rules, one a line."""
        return [f"{self._name}_{i}: {rule}" for i, rule in enumerate(self._rules)]

    def keywords(self) -> str:
        """Return the name of the rule of `a='x', b=1`."""
        schema, seen = self._root, set[str]()
        while "$ref" in schema and schema["$ref"] not in seen and isinstance(self._target(schema["$ref"]), Mapping):
            seen.add(schema["$ref"])
            schema = self._joined(self._target(schema["$ref"]), schema)
        self._note_unread(schema, "#", {"type", *_OF_OBJECTS, *_OF_ARRAYS})
        self._note_others(schema, "#")
        members = self._members(schema, "#", lambda key: f"{check_keyword(key)}=")
        if members is None:  # a required argument can have no value
            self._note("#", "")
            return self._add('""')
        return members

    def _joined(self, target: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
        """Return the root as one schema with what it refers to; where both speak of a property, the root does."""
        named, others = cast("Mapping[str, Any]", own.get("properties", {})), target.get("properties", {})
        joined = {**target, **{key: value for key, value in own.items() if key not in ("$ref", "$defs")}}
        if named and others:
            differing = [name for name in named if name in others and True not in (named[name], others[name])]
            if any(named[name] != others[name] for name in differing):
                self._note("#", "$ref")
            joined["properties"] = {**others, **{k: v for k, v in named.items() if k not in others or v is not True}}
        if target.get("additionalProperties", True) is not True and not named.keys() <= others.keys():
            self._note("#", "$ref")
        if "required" in own and "required" in target:
            joined["required"] = list(dict.fromkeys([*target["required"], *own["required"]]))
        return joined

    def _target(self, reference: str) -> Any:
        name = reference.removeprefix("#/$defs/")
        return self._root if reference == "#" else self._root.get("$defs", {})[name]

    def _add(self, rule: str) -> str:
        self._rules.append(rule)
        return f"{self._name}_{len(self._rules) - 1}"

    def _note_others(self, schema: Mapping[str, Any], place: str) -> None:
        for keyword in schema:
            if keyword not in _HELD and keyword not in _NO_RESTRICTIONS:
                self._note(place, keyword)

    def _note_unread(self, schema: Mapping[str, Any], place: str, read: Collection[str]) -> None:
        """Note what restricts values among the keywords that are held elsewhere and are not read here."""
        for keyword in schema:
            is_unread = keyword in _HELD and keyword not in read and keyword != "$defs"
            if is_unread and schema[keyword] is not True and schema[keyword] not in ({}, []):
                self._note(place, keyword)

    def _members(self, schema: Mapping[str, Any], place: str, spell: Callable[[str], str]) -> str | None:
        """Return a rule of what an object holds, in the schema's order, or None if it cannot have a required member.

        It is put together from the end: `first` is what can stand from a member on if nothing stands before it, and
        `rest` if something does, so that there is a comma.
        """
        required: Sequence[str] = schema.get("required", [])
        properties: Mapping[str, object] = schema.get("properties", {})
        others = schema.get("additionalProperties", True)
        members = {**properties, **{name: others for name in required if name not in properties}}
        if len(members) - len(set(required)) > MAX_OPTIONAL:
            raise ToolError("parameters.properties", f"has more than {MAX_OPTIONAL} members that may be left out")
        first = rest = '""'
        for key, given in reversed(members.items()):
            value = self.value(given, f"{place}/properties/{key}")
            is_required = key in required
            if value is None:
                if is_required:
                    return None
                continue
            item = self._add(f"{quoted(spell(key))} {value}")
            first = self._add(f"{item} {rest}" if is_required else f"{item} {rest} | {first}")
            rest = self._add(f'", " {item} {rest}' if is_required else f'(", " {item})? {rest}')
        return first

    def value(self, schema: object, place: str) -> str | None:
        """Return the name of the rule of a value, or None if there is no such value."""
        if not isinstance(schema, Mapping):
            return self._anything() if schema is True else None
        keywords = cast("Mapping[str, Any]", schema)
        self._note_others(keywords, place)
        named = keywords.get("type", "object" if "properties" in keywords else "array" if "items" in keywords else None)
        types = None if named is None else cast("Sequence[str]", [named] if isinstance(named, str) else named)
        if "enum" in keywords or "const" in keywords:
            values = cast("Sequence[object]", keywords["enum"] if "enum" in keywords else [keywords["const"]])
            self._note_unread(
                keywords, place, ["type", "enum" if "enum" in keywords else "const", *_irrelevant(values)]
            )
            return self._either([quoted(repr(value)) for value in values if types is None or _is_one(value, types)])
        if "$ref" in keywords:
            self._note_unread(keywords, place, ["$ref"])
            return self._reference(cast("str", keywords["$ref"]))
        if "anyOf" in keywords and not (keywords.get("properties") or "items" in keywords):
            self._note_unread(keywords, place, ["type", "anyOf"])
            some = enumerate(cast("Sequence[object]", keywords["anyOf"]))
            return self._either([self.value(_of_types(one, types), f"{place}/anyOf/{i}") for i, one in some])
        if types is None:
            self._note_unread(keywords, place, [])
            return self._anything()
        self._note_unread(keywords, place, ["type", *_OF_OBJECTS, *_OF_ARRAYS])
        return self._either([self._typed(one, keywords, place) for one in types])

    def _either(self, alternatives: Sequence[str | None]) -> str | None:
        possible = [one for one in alternatives if one is not None]
        return self._add(" | ".join(possible)) if possible else None

    def _reference(self, reference: str) -> str | None:
        """Return the rule of what a reference leads to; it may refer to itself."""
        if reference not in self._referred:
            self._referred[reference] = name = self._add('""')
            value = self.value(self._target(reference), reference)
            self._referred[reference] = name if value is not None else None
            self._rules[int(name.rpartition("_")[2])] = value or '""'
        return self._referred[reference]

    def _typed(self, name: str, schema: Mapping[str, Any], place: str) -> str | None:
        if name == "array":
            return self._array(schema, place)
        if name == "object":
            others = schema.get("additionalProperties", True)
            if not schema.get("properties") and not schema.get("required"):
                value = self.value(others, f"{place}/additionalProperties")
                return '"{}"' if value is None else self._mapping(value)
            members = self._members(schema, place, lambda key: f"{key!r}: ")
            return None if members is None else f'"{{" {members} "}}"'
        return _SCALARS[name]

    def _array(self, schema: Mapping[str, Any], place: str) -> str | None:
        """Return a rule of a list: all of `prefixItems`, and others in their number."""
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        fixed = cast("Sequence[object]", schema.get("prefixItems", ()))[:most]
        items = [self.value(one, f"{place}/prefixItems/{i}") for i, one in enumerate(fixed)]
        is_full = most is not None and most <= len(items)
        other = None if is_full else self.value(schema.get("items", True), f"{place}/items")
        least -= len(items)
        if None in items or (other is None and least > 0):
            return None
        parts = ' ", " '.join(cast("list[str]", items))
        if other is None:
            return f'"[" {parts} "]"'
        if items:
            return f'"[" {parts} (", " {other}){_times(least, most, len(items))} "]"'
        more = f'{other} (", " {other}){_times(least - 1, most, 1)}'
        return f'"[" {more} "]"' if least > 0 else f'"[" ({more})? "]"'

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


def _times(least: int, most: int | None, before: int) -> str:
    """Return how often something is repeated, of a number that counts `before` others."""
    if most is None and least <= 0:
        return "*"
    return f"{{{max(0, least)},{'' if most is None else most - before}}}"


def _of_types(schema: object, types: Sequence[str] | None) -> object:
    """Return an alternative that has one of some types."""
    if types is None or isinstance(schema, bool):
        return {"type": types} if schema is True else schema
    keywords = cast("Mapping[str, Any]", schema)
    own = keywords.get("type", types)
    listed = [own] if isinstance(own, str) else own
    common = [name for name in listed if name in types or (name == "integer" and "number" in types)]
    return {**keywords, "type": common} if common else False


def _irrelevant(values: Sequence[object]) -> list[str]:
    """Return the keywords that say nothing of listed values, as none is an object or a list."""
    has_objects, has_lists = (any(isinstance(value, kind) for value in values) for kind in (dict, list))
    return [*(() if has_objects else _OF_OBJECTS), *(() if has_lists else _OF_ARRAYS)]


def _is_one(value: object, types: Sequence[str]) -> bool:
    kinds = tuple(kind for name in types for kind in _PYTHON_TYPES[name])
    return isinstance(value, kinds) and (not isinstance(value, bool) or "boolean" in types)
