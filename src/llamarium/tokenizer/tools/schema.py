"""Whether a tool's parameters are a JSON schema at all: what its keywords have to be, whatever they ask for.

A free call is not held to its schema, so its description may have keywords that no grammar here holds. What is no
schema is refused.

Source: JSON Schema 2020-12, https://json-schema.org/draft/2020-12 (the meta-schema's core, applicators and validation).
"""

from collections.abc import Mapping, Sequence
from typing import cast

from llamarium.errors import ToolError, show_value

_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions")
_OF_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "propertyNames", "contains", "not", "if", "then", "else")


def check_schema(schema: object, where: str) -> None:
    if isinstance(schema, bool):
        return
    given = _mapping(schema, where, "a schema: an object, true or false")
    for key, value in given.items():
        path = f"{where}.{key}"
        if key == "type":
            _check_type(value, path)
        elif key == "required" and not all(isinstance(name, str) for name in _list(value, path)):
            raise ToolError(path, f"is {show_value(value)}; expected a list of names")
        elif key == "enum":
            _list(value, path)
        elif key in _OF_NAMES:
            for name, inner in _mapping(value, path, "an object of schemas by name").items():
                check_schema(inner, f"{path}.{name}")
        elif key in _OF_LISTS or (key == "items" and isinstance(value, list | tuple)):  # a list: older drafts' tuples
            for i, inner in enumerate(_list(value, path)):
                check_schema(inner, f"{path}[{i}]")
        elif key in _SINGLE:
            check_schema(value, path)


def _check_type(value: object, path: str) -> None:
    names = cast("Sequence[object]", value if isinstance(value, list | tuple) else [value])
    if not names or any(name not in _TYPES for name in names):
        raise ToolError(path, f"is {show_value(value)}; expected one or a list of {', '.join(_TYPES)}")


def _mapping(value: object, path: str, expected: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise ToolError(path, f"is {show_value(value)}; expected {expected}")
    return cast("Mapping[str, object]", value)


def _list(value: object, path: str) -> Sequence[object]:
    if not isinstance(value, list | tuple):
        raise ToolError(path, f"is {show_value(value)}; expected a list")
    return cast("Sequence[object]", value)
