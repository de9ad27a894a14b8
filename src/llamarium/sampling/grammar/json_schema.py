"""Translates a JSON schema for llguidance: each keyword is enforced, or refused by name and path.

llguidance ignores unknown keywords (a misspelled one, `nullable`), lets a schema choose leniency (`x-guidance`), and
reads some keywords unlike the standard. So `lowered` returns a schema of those keywords alone that have one meaning.

The result accepts nothing that the schema does not. It may accept less: properties come in the schema's order, integers
have no decimal point, characters are escaped only where they must be, and an object whose schema lists its properties
and says nothing of others has no others: small models would add some forever.

Source: JSON Schema 2020-12, https://json-schema.org/draft/2020-12 (core and validation).
"""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, cast

from llamarium.errors import GrammarError, GrammarLimitError, escape, show_value
from llamarium.sampling.grammar.finite import Path as _Path
from llamarium.sampling.grammar.finite import endless
from llamarium.sampling.grammar.patterns import FORMAT_LENGTHS, FORMATS, PatternError, translated
from llamarium.strict_json import NotJson, TooDeepJson, parse_json

MAX_DEPTH = 64
"""Nested schemas."""
MAX_SCHEMAS = 5000
"""Schemas within a schema; llguidance recurses over them, within the stack of `workers.py`."""
MAX_OPTIONAL = 400
"""Optional properties of an object; each is four items of llguidance's parser, which allows 2,000."""

_BLANKS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}"}  # bounded: some models would write blanks forever

_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_DIALECTS = ("draft/2020-12", "draft/2019-09", "draft-07", "draft-06")
_EXACT_INTEGER, _EXACT_DIGITS = 2**53, 15  # llguidance reads numbers as doubles, and not to the last bit

_ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment")
)
_JOINS = ("allOf", "anyOf", "oneOf")
_AT_ROOT = frozenset(("$schema", "$id"))
_LISTS = frozenset(("anyOf", "oneOf", "allOf", "prefixItems"))
_MAPS = frozenset(("properties", "patternProperties", "$defs", "definitions"))
_COUNTS = frozenset(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"))
_LIMITS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
_OTHERS = ("type", "enum", "const", "items", "additionalProperties", "required", "pattern", "format", "$ref")
SUPPORTED = tuple(sorted((*_LISTS, *_MAPS, *_COUNTS, *_LIMITS, *_OTHERS)))
"""Enforced keywords; `uniqueItems: false` has no effect."""


def parsed(text: str) -> Any:
    """Read JSON."""
    try:
        return parse_json(text)
    except TooDeepJson:
        raise _too_deep() from None
    except NotJson as error:
        raise GrammarError(f"the JSON schema is no JSON: {error}") from None


def rule(schema: Any, separators: tuple[str, str] | None = None) -> str:
    """Return the body of a rule of Lark: a lowered schema, with no blanks but those of `separators`, if given."""
    given = schema if isinstance(schema, dict) else {"allOf": [schema]}
    names = ("item_separator", "key_separator")
    blanks = {"whitespace_flexible": False, **dict(zip(names, separators, strict=True))} if separators else _BLANKS
    return f"%json {json.dumps({**given, 'x-guidance': blanks})}"


def lowered(schema: Any, *, open_objects: bool = False) -> Any:
    """Return a schema of llguidance's keywords that accepts only what `schema`, a JSON value, accepts.

    Objects whose schemas say nothing of `additionalProperties` are closed, unless `open_objects`.
    """
    reading = _Reading()
    found = reading.schema(schema, ())
    for path, target in reading.references.items():
        if target not in reading.schemas:
            raise _refused(path, f"$ref names {_show(target)}, and no schema that is read lies there")
    circles = endless(reading.schemas, reading.references)
    for path, target in reading.references.items():
        if target in circles:
            raise _refused(path, f"$ref names {_show(target)}, which no value fits that ends: it needs itself")
    if not open_objects:
        joined = _joined(reading.schemas, reading.references)
        for path in reading.kept.keys() - joined:
            _close(reading.kept[path])
    return found


def _close(kept: dict[str, Any]) -> None:
    """Forbid an object's other properties, if it lists all that it needs and says nothing of others."""
    is_listed = "properties" in kept or "patternProperties" in kept
    may_need_others = any(key in kept for key in ("minProperties", "enum", "const"))
    if is_listed and not may_need_others and set(kept.get("required", ())) <= kept.get("properties", {}).keys():
        kept.setdefault("additionalProperties", False)


def _joined(schemas: Mapping[_Path, Any], references: Mapping[_Path, _Path]) -> set[_Path]:
    """Return the schemas that a value follows together with others, whose properties closing one would forbid."""
    parts = {
        path: [(*path, key, str(i)) for key in _JOINS for i in range(len(schema.get(key, ())))]
        + ([references[path]] if path in references else [])
        for path, schema in schemas.items()
        if isinstance(schema, dict)
    }
    waiting = [path for path, inner in parts.items() if inner and _num_joined(schemas[path]) > 1]
    found = set[_Path]()
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += parts.get(path, ())
    return found


def _num_joined(schema: Mapping[str, Any]) -> int:
    """Return how many schemas a value follows at once: the object's own, those of `allOf`, and a branch of others."""
    own = any(key in schema for key in ("properties", "patternProperties", "additionalProperties", "enum", "const"))
    return own + len(schema.get("allOf", ())) + sum(key in schema for key in ("anyOf", "oneOf", "$ref"))


class _Reading:
    """The state of reading, by path: schemas, what is kept of them, and the targets of each `$ref`."""

    def __init__(self) -> None:
        self.schemas: dict[_Path, Any] = {}
        self.kept: dict[_Path, dict[str, Any]] = {}
        self.references: dict[_Path, _Path] = {}

    def schema(self, given: Any, path: _Path) -> Any:
        """Read a schema."""
        self.schemas[path] = given
        if len(self.schemas) > MAX_SCHEMAS:
            raise GrammarLimitError(f"the JSON schema is made of more than {MAX_SCHEMAS:,} schemas; make it smaller")
        if len(path) > 2 * MAX_DEPTH:  # a keyword and a name for each
            raise _too_deep()
        if isinstance(given, bool):
            return given
        if not isinstance(given, dict):
            raise _refused(path, f"the schema is {show_value(given)}; expected an object, true or false")
        kept = {key: self.keyword(key, value, path) for key, value in cast("dict[str, Any]", given).items()}
        _check_num_properties(kept, path)
        kept = {key: value for key, value in kept.items() if value is not _NOTHING}
        self.kept[path] = _with_limits(_with_format(kept))
        return self.kept[path]

    def keyword(self, key: str, value: Any, path: _Path) -> Any:
        """Read one keyword's value; `_NOTHING` for one without effect."""
        inner = (*path, key)
        if key in _ANNOTATIONS or (key.startswith("x-") and key != "x-guidance"):
            return _NOTHING
        if key in _AT_ROOT and not path:
            return _dialect(value, path) if key == "$schema" else _NOTHING
        if key in _LISTS:
            listed = _checked(list, key, value, path, "a list of schemas")
            return [self.schema(one, (*inner, str(i))) for i, one in enumerate(listed)]
        if key in _MAPS:
            named = _checked(dict, key, value, path, "an object of schemas")
            return {
                _pattern(name, path) if key == "patternProperties" else name: self.schema(one, (*inner, name))
                for name, one in named.items()
            }
        if key in ("items", "additionalProperties"):
            if isinstance(value, list):
                raise _refused(path, f"{key} is a list, as in older drafts; expected a schema (lists are prefixItems)")
            return self.schema(value, inner)
        if key == "$ref":
            self.references[path] = _reference(value, path)
            return value
        if key == "uniqueItems" and value is False:
            return _NOTHING
        if key not in _VALUES:
            raise _refused(path, f"the keyword {show_value(key)} is not supported; there are: {', '.join(SUPPORTED)}")
        return _VALUES[key](key, value, path)


_NOTHING = object()


def _show(path: _Path) -> str:
    return escape("/".join(("#", *path)))


def _refused(path: _Path, why: str) -> GrammarError:
    return GrammarError(f"the JSON schema, at {_show(path)}: {why}")


def _too_deep() -> GrammarLimitError:
    return GrammarLimitError(f"the JSON schema is nested deeper than {MAX_DEPTH} schemas; make it flatter")


def _checked(kind: type, key: str, value: Any, path: _Path, expected: str) -> Any:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise _refused(path, f"{key} is {show_value(value)}; expected {expected}")
    return value


# --- values of keywords -----------------------------------------------------------------------------------------------


def _dialect(value: Any, path: _Path) -> Any:
    if not isinstance(value, str) or not any(name in value for name in _DIALECTS):
        raise _refused(path, f"$schema is {show_value(value)}; expected one of {', '.join(_DIALECTS)}")
    return _NOTHING


def _type(key: str, value: Any, path: _Path) -> Any:
    names: list[Any] = value if isinstance(value, list) else [value]
    if not names or any(name not in _TYPES for name in names) or len(set(names)) < len(names):
        raise _refused(path, f"type is {show_value(value)}; expected one or a list of {', '.join(_TYPES)}")
    return [name for name in names if not (name == "integer" and "number" in names)]


def _number(key: str, value: Any, path: _Path) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _refused(path, f"{key} is {show_value(value)}; expected a number")
    return _exact(key, value, path)


def _exact(key: str, value: float, path: _Path) -> float:
    """Return a number that llguidance represents exactly; a whole one as int."""
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        value = int(value)
    digits = str(value).partition("e")[0].strip("-0.").replace(".", "")
    is_exact = abs(value) <= _EXACT_INTEGER if isinstance(value, int) else len(digits) <= _EXACT_DIGITS
    if not is_exact or (isinstance(value, float) and not 1e-15 <= abs(value) <= 1e15):
        raise _refused(
            path,
            f"{key} is {show_value(value)}; expected a number of at most {_EXACT_DIGITS} digits (2^53 if it is whole)"
            " from 1e-15 to 1e15: another cannot be kept exactly",
        )
    return value


def _count(key: str, value: Any, path: _Path) -> Any:
    number = _number(key, value, path)
    if not isinstance(number, int) or number < 0:
        raise _refused(path, f"{key} is {show_value(value)}; expected a whole number, at least 0")
    return number


def _multiple(key: str, value: Any, path: _Path) -> Any:
    if (number := _number(key, value, path)) <= 0:
        raise _refused(path, f"{key} is {show_value(value)}; expected a number above 0")
    return number


def _constant(key: str, value: Any, path: _Path, depth: int = 0) -> Any:
    """Return a value with all of its numbers checked."""
    if depth > MAX_DEPTH:
        raise _too_deep()
    if isinstance(value, list):
        return [_constant(key, one, path, depth + 1) for one in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {name: _constant(key, one, path, depth + 1) for name, one in cast("dict[str, Any]", value).items()}
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _exact(key, value, path)
    return value


def _enum(key: str, value: Any, path: _Path) -> Any:
    return [_constant(key, one, path) for one in _checked(list, key, value, path, "a list of values")]


def _required(key: str, value: Any, path: _Path) -> Any:
    return [_checked(str, key, name, path, "a list of names") for name in _checked(list, key, value, path, "a list")]


def _pattern_of(key: str, value: Any, path: _Path) -> Any:
    return _pattern(_checked(str, key, value, path, "a regular expression"), path)


def _pattern(value: str, path: _Path) -> str:
    try:
        return translated(value)
    except PatternError as error:
        raise _refused(path, f"the pattern {show_value(value)} {error}") from None


def _format(key: str, value: Any, path: _Path) -> Any:
    if value not in FORMATS:
        raise _refused(path, f"the format {show_value(value)} is not supported; there are: {', '.join(FORMATS)}")
    return value


def _reference(value: Any, path: _Path) -> _Path:
    if value == "#":
        return ()
    if not isinstance(value, str) or not value.startswith("#/") or "~" in value or "%" in value or value == "#/":
        raise _refused(path, f"$ref is {show_value(value)}; expected # or #/..., within this schema, without ~ and %")
    return tuple(value[2:].split("/"))


def _with_format(kept: dict[str, Any]) -> dict[str, Any]:
    """Replace a format by a pattern, beside the schema's own."""
    if "format" not in kept:
        return kept
    name = kept.pop("format")
    said: dict[str, Any] = {"pattern": f"^(?:{FORMATS[name]})$"}
    if name in FORMAT_LENGTHS:
        said["maxLength"] = FORMAT_LENGTHS[name]
    return {**kept, "allOf": [*kept.get("allOf", []), said]} if said.keys() & kept.keys() else kept | said


def _with_limits(kept: dict[str, Any]) -> dict[str, Any]:
    """Replace exclusive whole limits by inclusive ones: llguidance 1.9.1 accepts 0 between an exclusive 0 and 0.5."""
    for excluded, included, step, nearer in (
        ("exclusiveMinimum", "minimum", 1, max),
        ("exclusiveMaximum", "maximum", -1, min),
    ):
        limit = kept.get(excluded)
        if isinstance(limit, int):
            places = max(0, min(9, _EXACT_DIGITS - 1 - len(str(abs(limit)))))
            moved = round(limit + step * 10.0**-places, places)
            kept = {**kept, included: nearer(kept.get(included, moved), moved)}
            del kept[excluded]
    return kept


def _check_num_properties(kept: Mapping[str, Any], path: _Path) -> None:
    """Refuse a least number of properties that a repeated name could reach, and too many optional properties."""
    optional = len(kept.get("properties", {}).keys() - set(kept.get("required", ())))
    if optional > MAX_OPTIONAL:
        raise GrammarLimitError(
            f"the JSON schema, at {_show(path)}: {optional:,} properties can be left out; at most {MAX_OPTIONAL} may"
        )
    at_least, named = kept.get("minProperties", 0), len(set(kept.get("required", ())))
    if at_least > named + 1:
        raise _refused(
            path, f"minProperties is {at_least}, and {named} are required; at most one more than those can be counted"
        )


_VALUES: Mapping[str, Callable[[str, Any, _Path], Any]] = {
    **dict.fromkeys(_COUNTS, _count),
    **dict.fromkeys(_LIMITS, _number),
    "multipleOf": _multiple,
    "type": _type,
    "enum": _enum,
    "const": _constant,
    "required": _required,
    "pattern": _pattern_of,
    "format": _format,
}
