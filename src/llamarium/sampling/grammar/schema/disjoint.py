"""Tells whether two schemas can be proven to have no value in common.

It reads schemas as they were given: what a grammar accepts less than a schema must not count. A proof is given up after
a number of steps (`Reader.may_compare`), as references can make it longer without end.
"""

import json
from typing import Any, cast

from llamarium.sampling.grammar.schema.reader import Reader
from llamarium.sampling.grammar.schema.unenforced import Path

_MAX_DEPTH = 6
_NAMES_PER_VALUE = 4  # a value is spelled before it is compared
ONLY_OBJECTS = frozenset(("object",))
"""The kinds of a schema of objects."""
_KINDS = frozenset(("null", "boolean", "integer", "fraction", "string", "array", "object"))


def spelled(value: Any) -> str:
    """Return a text that equal JSON values share, and others do not."""
    return json.dumps(_normal(value), sort_keys=True)


def _normal(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _normal(inner) for name, inner in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [_normal(inner) for inner in cast("list[Any]", value)]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def listed_values(schema: Any) -> list[Any] | None:
    """Return the values that a schema lists, or None."""
    if not isinstance(schema, dict):
        return None
    keywords = cast("dict[str, Any]", schema)
    listed = [keywords["const"]] if "const" in keywords else keywords.get("enum")
    return cast("list[Any]", listed) if isinstance(listed, list) else None


def kinds_of(reader: Reader, schema: Any, path: Path, depth: int = 0) -> frozenset[str]:
    """Return the kinds of values that a schema may accept; a number is an integer or a fraction."""
    schema, path = reader.resolved(schema, path)
    num_values = len(listed_values(schema) or ())
    if not isinstance(schema, dict) or depth > _MAX_DEPTH or not reader.may_compare(num_values):
        return _KINDS if schema is not False else frozenset()
    keywords = cast("dict[str, Any]", schema)
    names = keywords.get("type", list(_KINDS))
    kinds = {kind for name in (names if isinstance(names, list) else [names]) for kind in _kinds_of_type(name)}
    if keywords.get("nullable") is True:
        kinds.add("null")
    if (listed := listed_values(keywords)) is not None:
        kinds &= {kind for value in listed for kind in _kinds_of_value(value)}
    for i, part in enumerate(_parts(keywords, "allOf")):
        kinds &= kinds_of(reader, part, (*path, "allOf", str(i)), depth + 1)
    for key in ("anyOf", "oneOf"):
        if parts := _parts(keywords, key):
            each = [kinds_of(reader, part, (*path, key, str(i)), depth + 1) for i, part in enumerate(parts)]
            kinds &= frozenset[str]().union(*each)
    return frozenset(kinds)


def are_disjoint(reader: Reader, a: Any, at_a: Path, b: Any, at_b: Path, depth: int = 0) -> bool:
    """Return whether no value satisfies both schemas; False if that is not obvious."""
    if not reader.may_compare():
        return False
    a, at_a = reader.resolved(a, at_a)
    b, at_b = reader.resolved(b, at_b)
    if a is False or b is False:
        return True
    if not isinstance(a, dict) or not isinstance(b, dict) or depth > _MAX_DEPTH:
        return False
    schema_a, schema_b = cast("dict[str, Any]", a), cast("dict[str, Any]", b)
    values_a, values_b = listed_values(schema_a), listed_values(schema_b)
    if not reader.may_compare(_NAMES_PER_VALUE * (len(values_a or ()) + len(values_b or ()))):
        return False
    if values_a is not None and values_b is not None and not set(map(spelled, values_a)) & set(map(spelled, values_b)):
        return True
    common = kinds_of(reader, schema_a, at_a) & kinds_of(reader, schema_b, at_b)
    if not common:
        return True
    for x, at_x, y, at_y in ((schema_a, at_a, schema_b, at_b), (schema_b, at_b, schema_a, at_a)):
        for key, quantifier in (("allOf", any), ("anyOf", all), ("oneOf", all)):
            parts = enumerate(_parts(x, key))
            if _parts(x, key) and quantifier(
                are_disjoint(reader, part, (*at_x, key, str(i)), y, at_y, depth + 1) for i, part in parts
            ):
                return True
    return common == ONLY_OBJECTS and _differ_in_a_property(reader, schema_a, at_a, schema_b, at_b, depth)


def _differ_in_a_property(
    reader: Reader, a: dict[str, Any], at_a: Path, b: dict[str, Any], at_b: Path, depth: int
) -> bool:
    names = dict.fromkeys([*required_of(a), *required_of(b)])
    if not reader.may_compare(len(names)):
        return False
    restricted = [name for name in names if _property(a, name) is not True or _property(b, name) is not True]
    return any(
        are_disjoint(
            reader, _property(a, name), (*at_a, "properties", name), _property(b, name), (*at_b, "properties", name),
            depth + 1,
        )
        for name in restricted
    )  # fmt: skip


def _property(schema: dict[str, Any], name: str) -> Any:
    properties = schema.get("properties")
    if isinstance(properties, dict) and name in properties:
        return properties[name]
    return schema.get("additionalProperties") is not False or bool(schema.get("patternProperties"))


def required_of(schema: Any) -> list[str]:
    """Return the names that an object needs by a schema itself."""
    names = schema.get("required") if isinstance(schema, dict) else None
    return [name for name in cast("list[Any]", names) if isinstance(name, str)] if isinstance(names, list) else []


def _parts(schema: dict[str, Any], key: str) -> list[Any]:
    parts = schema.get(key)
    return cast("list[Any]", parts) if isinstance(parts, list) else []


def _kinds_of_type(name: Any) -> tuple[str, ...]:
    return ("integer", "fraction") if name == "number" else (name,) if name in _KINDS else tuple(_KINDS)


def _kinds_of_value(value: Any) -> tuple[str, ...]:
    if value is None or isinstance(value, bool):
        return ("null",) if value is None else ("boolean",)
    if isinstance(value, int | float):
        return ("integer",) if value == int(value) else ("fraction",)
    return ("string",) if isinstance(value, str) else ("array",) if isinstance(value, list) else ("object",)
