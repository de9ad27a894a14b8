"""Closes objects whose schemas list their properties and say nothing of others.

JSON Schema would allow others, and what is answered is valid either way; but small models would add some forever.
Schemas that a value follows together with others (`allOf`, `$ref` beside keywords) are closed as one, to the properties
that any of them lists.
"""

from collections.abc import Iterator, Mapping
from typing import Any, cast

from llamarium.sampling.grammar.schema.finite import subschemas
from llamarium.sampling.grammar.schema.objects import MAX_OPTIONAL

_MAX_WRITTEN = 128 * 1024
"""Characters of names that are written beside those of parts; objects beyond stay open, which is as valid."""
_SIGNS = 8
"""Characters around a name."""
_PROPERTY_KEYWORDS = ("properties", "patternProperties", "additionalProperties", "enum", "const")


def close_objects(root: Any, definitions: Mapping[str, Any]) -> None:
    """Close the objects of a lowered schema, in place."""
    targets = {"#": root, **{f"#/$defs/{name}": schema for name, schema in definitions.items()}}
    schemas = [schema for top in targets.values() for schema in _within(top)]
    parts = {id(schema): list(_parts(schema, targets)) for schema in schemas}
    joined = set[int]()
    waiting = [schema for schema in schemas if _num_joined(schema) > 1]
    roots = list(waiting)
    while waiting:
        for part in parts.get(id(waiting.pop()), ()):
            if id(part) not in joined:
                joined.add(id(part))
                waiting.append(part)
    for schema in schemas:
        if id(schema) not in joined and _num_joined(schema) <= 1:
            _close(schema)
    budget = _MAX_WRITTEN
    for schema in roots:
        if id(schema) not in joined and budget > 0:
            budget -= _close_together(schema, parts)


def _within(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        yield schema
        for inner in subschemas(schema):
            yield from _within(inner)


def _parts(schema: Mapping[str, Any], targets: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the schemas that a value follows together with this one, or one of which it follows."""
    for key in ("allOf", "anyOf"):
        yield from (part for part in schema.get(key, ()) if isinstance(part, dict))
    if "$ref" in schema and isinstance(targets[schema["$ref"]], dict):
        yield targets[schema["$ref"]]


def _num_joined(schema: Mapping[str, Any]) -> int:
    """Return how many schemas a value follows at once: the object's own, those of `allOf`, and a branch of others."""
    has_properties = any(key in schema for key in _PROPERTY_KEYWORDS)
    return has_properties + len(schema.get("allOf", ())) + sum(key in schema for key in ("anyOf", "$ref"))


def _close(schema: dict[str, Any]) -> None:
    """Forbid an object's other properties, if it lists all that it needs and says nothing of others."""
    is_listed = "properties" in schema or "patternProperties" in schema
    may_need_others = any(key in schema for key in ("minProperties", "enum", "const"))
    if is_listed and not may_need_others and set(schema.get("required", ())) <= schema.get("properties", {}).keys():
        schema.setdefault("additionalProperties", False)


def _close_together(schema: dict[str, Any], parts: Mapping[int, list[dict[str, Any]]]) -> int:
    """Forbid the properties that no part of a joined schema lists, unless a part has a keyword about other properties.

    Returns how many characters of names that took, with some for each part.
    """
    names: dict[str, bool] = {}
    required, visited, waiting = set[str](), set[int](), [schema]
    while waiting:
        part = waiting.pop()
        if id(part) in visited:
            continue
        visited.add(id(part))
        if part.keys() & {"patternProperties", "additionalProperties", "minProperties", "enum", "const"}:
            return len(visited) * _SIGNS
        names |= dict.fromkeys(part.get("properties", {}), True)
        required |= set(part.get("required", ()))
        waiting += reversed(parts.get(id(part), ()))
    num_optional = len(names.keys() - required)
    if names and required <= names.keys() and num_optional <= MAX_OPTIONAL:
        properties = cast("dict[str, Any]", schema.get("properties", {}))
        schema["properties"] = {**properties, **{name: True for name in names if name not in properties}}
        schema["additionalProperties"] = False
    return sum(map(len, names)) + (len(names) + len(visited)) * _SIGNS
