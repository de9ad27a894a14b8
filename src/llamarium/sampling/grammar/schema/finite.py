"""Finds definitions that no finite value fits.

`{"$ref": "#"}` is one, and an object that requires a property of its own kind. A grammar accepts them: an answer would
begin, and could never be complete.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, cast

_ROOT = "#"


def endless(root: Any, definitions: Mapping[str, Any]) -> set[str]:
    """Return the references to lowered schemas that no finite value satisfies.

    A definition is finite once those that it needs are; the rest are circles.
    """
    schemas = {_ROOT: root, **{f"#/$defs/{name}": schema for name, schema in definitions.items()}}
    needed_by: dict[str, list[str]] = defaultdict(list)
    for name, schema in schemas.items():
        for target in set(references(schema)):
            needed_by[target].append(name)
    ending: set[str] = set()
    waiting = list(schemas)
    while waiting:
        name = waiting.pop()
        if name not in ending and _ends(schemas[name], ending):
            ending.add(name)
            waiting += needed_by[name]
    return schemas.keys() - ending


def references(schema: Any) -> Iterator[str]:
    """Yield the references of a schema."""
    if isinstance(schema, dict):
        keywords = cast("dict[str, Any]", schema)
        if "$ref" in keywords:
            yield keywords["$ref"]
        for inner in subschemas(keywords):
            yield from references(inner)


def subschemas(schema: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the direct subschemas of a lowered schema."""
    for key in ("allOf", "anyOf", "prefixItems"):
        yield from schema.get(key, ())
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield schema[key]
    for key in ("properties", "patternProperties"):
        yield from schema.get(key, {}).values()


def _ends(schema: Any, ending: set[str]) -> bool:
    if not isinstance(schema, dict):
        return bool(schema)
    keywords = cast("dict[str, Any]", schema)
    if keywords.get("$ref", _ROOT) not in ending and "$ref" in keywords:
        return False
    if not all(_ends(inner, ending) for inner in keywords.get("allOf", ())):
        return False
    if "anyOf" in keywords and not any(_ends(inner, ending) for inner in keywords["anyOf"]):
        return False
    if "const" in keywords or "enum" in keywords:
        return True
    return any(_type_ends(name, keywords, ending) for name in keywords.get("type", ["null"]))


def _type_ends(name: str, schema: Mapping[str, Any], ending: set[str]) -> bool:
    if name == "array":
        fixed, minimum = schema.get("prefixItems", []), schema.get("minItems", 0)
        items = fixed[:minimum] + ([schema["items"]] if minimum > len(fixed) and "items" in schema else [])
        return all(_ends(inner, ending) for inner in items)
    if name == "object":
        properties = schema.get("properties", {})
        return all(_ends(properties[key], ending) for key in schema.get("required", ()) if key in properties)
    return True
