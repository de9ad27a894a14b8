"""Older and neighbouring dialects of JSON Schema, put into the words of 2020-12.

Drafts 3 to 7 (boolean limits, `dependencies`, `required: true` of a property), OpenAPI 3.0 (`nullable`) and Google's
(types in capitals). Sources: https://json-schema.org/specification, https://spec.openapis.org/oas/v3.0.3#schema-object.
"""

from collections.abc import Mapping
from typing import Any, cast

from llamarium.sampling.grammar.schema.values import LOWER, TYPES, UPPER


def current(original: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return a schema's keywords as 2020-12 has them, and whether null is accepted beside them."""
    schema = dict(original)
    for limit, exclusive in (LOWER, UPPER):
        if isinstance(schema.get(exclusive), bool) and schema.pop(exclusive) and limit in schema:
            schema[exclusive] = schema.pop(limit)
    if isinstance(dependencies := schema.get("dependencies"), dict):
        del schema["dependencies"]
        _add_dependencies(schema, cast("dict[str, Any]", dependencies))
    if isinstance(schema.get("required"), bool):
        del schema["required"]
    if required := _required_properties(schema):
        listed = schema.get("required", [])
        schema["required"] = [*listed, *required] if isinstance(listed, list) else listed
    _rename_types(schema)
    return schema, _accepts_null(schema)


def _add_dependencies(schema: dict[str, Any], dependencies: Mapping[str, Any]) -> None:
    """Add what `dependencies` says to the two keywords that came after it, which may stand beside it."""
    for name, value in dependencies.items():
        key = "dependentRequired" if isinstance(value, list) else "dependentSchemas"
        existing = schema.get(key, {})
        if not isinstance(existing, dict):  # a fault, which is named where the keyword is read
            continue
        entries = cast("dict[str, Any]", existing)
        if name not in entries:
            combined = value
        elif not isinstance(value, list):
            combined = {"allOf": [entries[name], value]}
        elif isinstance(entries[name], list):
            combined = [*entries[name], *value]
        else:
            continue
        schema[key] = {**entries, name: combined}


def _required_properties(schema: Mapping[str, Any]) -> list[str]:
    """Return the properties that say themselves that they are required."""
    properties = schema.get("properties")
    schemas = cast("dict[str, Any]", properties).items() if isinstance(properties, dict) else ()
    return [
        name
        for name, inner in schemas
        if isinstance(inner, dict) and cast("dict[str, Any]", inner).get("required") is True
    ]


def _rename_types(schema: dict[str, Any]) -> None:
    name = schema.get("type")
    if name == "any":
        del schema["type"]
    elif isinstance(name, str) and name.isupper() and name.lower() in TYPES:
        schema["type"] = name.lower()


def _accepts_null(schema: dict[str, Any]) -> bool:
    """Take `nullable` out, and return whether it adds null: among listed values null has to be one."""
    if schema.pop("nullable", None) is not True:
        return False
    listed = schema.get("enum", [schema["const"]] if "const" in schema else [None])
    return not isinstance(listed, list) or None in listed
