"""Keywords that join schemas: `oneOf`, `not`, conditions and dependencies, in keywords that a grammar enforces.

The replacements accept no value that the originals reject. Without a simple replacement, the keyword is noted.
"""

import json
from collections.abc import Mapping
from itertools import combinations
from typing import Any, cast

from llamarium.sampling.grammar.schema.disjoint import (
    ONLY_OBJECTS,
    are_disjoint,
    kinds_of,
    listed_values,
    required_of,
    spelled,
)
from llamarium.sampling.grammar.schema.reader import Reader
from llamarium.sampling.grammar.schema.unenforced import Path
from llamarium.sampling.grammar.schema.values import TYPES, NotEnforceable, checked, is_exact, plain_constant

_MAX_BRANCHES = 64
_MAX_DEPENDENCIES = 6
_LISTING = frozenset(("enum", "const", "type", "title", "description"))
_TOO_COMPLEX = "is more than a grammar enforces here"


def or_null(lowered: Any) -> Any:
    """Return a schema that accepts null, too."""
    if not isinstance(lowered, dict):
        return lowered or {"type": ["null"]}
    keywords = cast("dict[str, Any]", lowered)
    if keywords.keys() & {"enum", "const", "allOf", "anyOf", "$ref"} or "type" not in keywords:
        return {"anyOf": [keywords, {"type": ["null"]}]}
    return {**keywords, "type": list(dict.fromkeys([*keywords["type"], "null"]))}


def one_of(reader: Reader, lowered: dict[str, Any], schema: Mapping[str, Any], path: Path) -> None:
    """Lower `oneOf` to branches that exclude each other."""
    listed = checked(list, schema["oneOf"], "a list of schemas")
    branches = [reader.schema(branch, (*path, "oneOf", str(i))) for i, branch in enumerate(listed)]
    forbidden: list[set[str]] = [set() for _ in branches]
    if len(branches) > _MAX_BRANCHES or not all(
        _keep_apart(reader, listed, i, j, forbidden, schema, path) for i, j in combinations(range(len(branches)), 2)
    ):
        reader.note(path, "oneOf", "has branches that may overlap: it is enforced as anyOf")
        forbidden = [set() for _ in branches]
    parts = [_without(branch, names) for branch, names in zip(branches, forbidden, strict=True)]
    _add(lowered, {"anyOf": parts}) if "anyOf" in lowered else lowered.update(anyOf=parts)


def _keep_apart(
    reader: Reader, listed: list[Any], i: int, j: int, forbidden: list[set[str]], schema: Mapping[str, Any], path: Path
) -> bool:
    """Return whether no value satisfies both branches, after forbidding each a property that the other requires."""
    at_i, at_j = (*path, "oneOf", str(i)), (*path, "oneOf", str(j))
    if are_disjoint(reader, listed[i], at_i, listed[j], at_j):
        return True
    own_type = {key: schema[key] for key in ("type",) if key in schema}
    common = kinds_of(reader, own_type, path) & kinds_of(reader, listed[i], at_i) & kinds_of(reader, listed[j], at_j)
    required = [required_of(reader.resolved(listed[k], at)[0]) for k, at in ((i, at_i), (j, at_j))]
    if not reader.may_compare(len(required[0]) + len(required[1])):
        return False
    sets = [set(names) for names in required]
    only_i = [name for name in required[0] if name not in sets[1]]
    only_j = [name for name in required[1] if name not in sets[0]]
    if common != ONLY_OBJECTS or not only_i or not only_j:
        return False
    if not forbidden[i] & set(only_j):
        forbidden[i].add(only_j[0])
    if not forbidden[j] & set(only_i):
        forbidden[j].add(only_i[0])
    return True


def _without(branch: Any, names: set[str]) -> Any:
    """Return a branch whose objects lack some properties."""
    if not names or not isinstance(branch, dict):
        return branch
    schema, none = cast("dict[str, Any]", branch), dict.fromkeys(sorted(names), False)
    if schema.keys() & {"allOf", "anyOf", "$ref"}:
        return {"allOf": [schema, {"properties": none}]}
    return {**schema, "properties": {**schema.get("properties", {}), **none}}


def negated(reader: Reader, lowered: dict[str, Any], schema: Mapping[str, Any], path: Path) -> bool:
    """Lower `not`; return whether no value is accepted."""
    inner, _ = reader.resolved(schema["not"], (*path, "not"))
    if isinstance(inner, bool) or inner == {}:
        return inner is not False
    excluded_schema = checked(dict, inner, "a schema")
    listed, values = listed_values(lowered), listed_values(excluded_schema)
    if excluded_schema.keys() == {"type"}:
        excluded = excluded_schema["type"] if isinstance(excluded_schema["type"], list) else [excluded_schema["type"]]
        types = [name for name in lowered.get("type", TYPES) if name not in excluded]
        types = [name for name in types if not (name == "integer" and "number" in excluded)]
        if "integer" not in excluded or "number" not in types:
            lowered["type"] = [name for name in types if not (name == "integer" and "number" in types)]
            return not types
    elif values is not None and listed is not None and excluded_schema.keys() <= {"enum", "const", "type"}:
        excluded = set(map(spelled, values))
        lowered.pop("const", None)
        lowered["enum"] = [value for value in listed if spelled(value) not in excluded]
        return not lowered["enum"]
    elif excluded_schema.keys() == {"required"} and len(names := required_of(excluded_schema)) == 1:
        _add(lowered, {"type": ["object"], "properties": {names[0]: False}})  # values of other types satisfy `required`
        return False
    raise NotEnforceable(_TOO_COMPLEX)


def conditional(reader: Reader, lowered: dict[str, Any], schema: Mapping[str, Any], path: Path) -> None:
    """Lower `if` if it tests the value of one listed property; others are noted."""
    condition, _ = reader.resolved(schema["if"], (*path, "if"))
    branches = [reader.schema(schema.get(key, True), (*path, key)) for key in ("then", "else")]
    if isinstance(condition, bool):
        return _add(lowered, branches[0 if condition else 1])
    properties = condition.get("properties") if isinstance(condition, dict) else None
    if (
        not isinstance(properties, dict)
        or len(properties) != 1
        or condition.keys() - {"properties", "required", "type"}
    ):
        raise NotEnforceable(_TOO_COMPLEX)
    ((name, tested),) = cast("dict[str, Any]", properties).items()
    own_properties, at = schema.get("properties"), (*path, "properties", name)
    listed = (
        listed_values(reader.resolved(own_properties[name], at)[0])
        if isinstance(own_properties, dict) and name in own_properties
        else None
    )
    values = listed_values(tested)
    if listed is None or values is None or not is_exact(listed) or kinds_of(reader, dict(schema), path) != ONLY_OBJECTS:
        raise NotEnforceable(_TOO_COMPLEX)
    if set(required_of(condition)) - {name} or tested.keys() - _LISTING or not _allows_objects(condition):
        raise NotEnforceable(_TOO_COMPLEX)
    reader.write_out(len(json.dumps(listed)))
    branches = [reader.shared(branch) for branch in branches]  # one of them is repeated
    tested_values = set(map(spelled, values))
    yes = [value for value in listed if spelled(value) in tested_values]
    no = [value for value in listed if spelled(value) not in tested_values]
    is_needed = name in required_of(condition)
    absent = {"allOf": [{"properties": {name: False}}, branches[1 if is_needed else 0]]}
    parts = [_where(name, yes, branches[0]), _where(name, no, branches[1]), absent]
    usable = [values for values in (yes, no) if values]
    kept_parts = [part for part, has_values in zip(parts, (yes, no, True), strict=True) if has_values]
    _add(lowered, {"anyOf": kept_parts if name not in required_of(schema) else kept_parts[: len(usable)]})
    return None


def _allows_objects(schema: Mapping[str, Any]) -> bool:
    names = schema.get("type", "object")
    return "object" in (names if isinstance(names, list) else [names])


def _where(name: str, values: list[Any], consequence: Any) -> dict[str, Any]:
    return {"allOf": [{"properties": {name: {"enum": plain_constant(values)}}, "required": [name]}, consequence]}


def dependent(reader: Reader, lowered: dict[str, Any], key: str, schema: Mapping[str, Any], path: Path) -> None:
    """Lower `dependentRequired` and `dependentSchemas`: a property is absent, or its dependency holds."""
    dependencies = cast("dict[str, Any]", checked(dict, schema[key], "an object by name"))
    if len(dependencies) > _MAX_DEPENDENCIES:
        raise NotEnforceable(_TOO_COMPLEX)
    for name, value in dependencies.items():
        if key == "dependentRequired":
            names = checked(list, value, "a list of names")
            present: Any = {"required": [name, *(checked(str, required, "a name") for required in names)]}
        else:
            present = {"allOf": [{"required": [name]}, reader.schema(value, (*path, key, name))]}
        if name in required_of(schema):
            _add(lowered, present)
        else:
            _add(lowered, {"anyOf": [{"properties": {name: False}}, present]})


def _add(lowered: dict[str, Any], part: Any) -> None:
    if part is not True:
        lowered.setdefault("allOf", []).append(part)
