"""Keywords that join schemas: `oneOf`, `not`, conditions and dependencies, in words that a grammar holds.

What they are turned into accepts no more than they do. Where nothing simple does, they are noted.
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
from llamarium.sampling.grammar.schema.values import TYPES, NotHeld, checked, is_exact, plain_constant

_MAX_BRANCHES = 64
_MAX_DEPENDENCIES = 6
_LISTING = frozenset(("enum", "const", "type", "title", "description"))
_TOO_COMPLEX = "is more than a grammar holds here"


def or_null(kept: Any) -> Any:
    """Return a schema that accepts null, too."""
    if not isinstance(kept, dict):
        return kept or {"type": ["null"]}
    schema = cast("dict[str, Any]", kept)
    if schema.keys() & {"enum", "const", "allOf", "anyOf", "$ref"} or "type" not in schema:
        return {"anyOf": [schema, {"type": ["null"]}]}
    return {**schema, "type": list(dict.fromkeys([*schema["type"], "null"]))}


def one_of(reader: Reader, kept: dict[str, Any], given: Mapping[str, Any], path: Path) -> None:
    """Hold `oneOf` as branches of which no answer follows two."""
    listed = checked(list, given["oneOf"], "a list of schemas")
    branches = [reader.schema(one, (*path, "oneOf", str(i))) for i, one in enumerate(listed)]
    forbidden: list[set[str]] = [set() for _ in branches]
    if len(branches) > _MAX_BRANCHES or not all(
        _keep_apart(reader, listed, i, j, forbidden, given, path) for i, j in combinations(range(len(branches)), 2)
    ):
        reader.note(path, "oneOf", "has branches that may overlap: it is held as anyOf")
        forbidden = [set() for _ in branches]
    parts = [_without(branch, names) for branch, names in zip(branches, forbidden, strict=True)]
    _add(kept, {"anyOf": parts}) if "anyOf" in kept else kept.update(anyOf=parts)


def _keep_apart(
    reader: Reader, listed: list[Any], i: int, j: int, forbidden: list[set[str]], given: Mapping[str, Any], path: Path
) -> bool:
    """Return whether no answer follows both branches, forbidding each a property that the other needs."""
    at_i, at_j = (*path, "oneOf", str(i)), (*path, "oneOf", str(j))
    if are_disjoint(reader, listed[i], at_i, listed[j], at_j):
        return True
    own = {key: given[key] for key in ("type",) if key in given}
    common = kinds_of(reader, own, path) & kinds_of(reader, listed[i], at_i) & kinds_of(reader, listed[j], at_j)
    needed = [required_of(reader.resolved(listed[k], at)[0]) for k, at in ((i, at_i), (j, at_j))]
    if not reader.may_compare(len(needed[0]) + len(needed[1])):
        return False
    sets = [set(names) for names in needed]
    only_i = [name for name in needed[0] if name not in sets[1]]
    only_j = [name for name in needed[1] if name not in sets[0]]
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


def negated(reader: Reader, kept: dict[str, Any], given: Mapping[str, Any], path: Path) -> bool:
    """Hold `not`; return whether nothing at all is accepted."""
    inner, _ = reader.resolved(given["not"], (*path, "not"))
    if isinstance(inner, bool) or inner == {}:
        return inner is not False
    schema = checked(dict, inner, "a schema")
    own, values = listed_values(kept), listed_values(schema)
    if schema.keys() == {"type"}:
        excluded = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        left = [name for name in kept.get("type", TYPES) if name not in excluded]
        left = [name for name in left if not (name == "integer" and "number" in excluded)]
        if "integer" not in excluded or "number" not in left:
            kept["type"] = [name for name in left if not (name == "integer" and "number" in left)]
            return not left
    elif values is not None and own is not None and schema.keys() <= {"enum", "const", "type"}:
        excluded = set(map(spelled, values))
        kept.pop("const", None)
        kept["enum"] = [value for value in own if spelled(value) not in excluded]
        return not kept["enum"]
    elif schema.keys() == {"required"} and len(names := required_of(schema)) == 1:
        _add(kept, {"type": ["object"], "properties": {names[0]: False}})  # other values have all that is required
        return False
    raise NotHeld(_TOO_COMPLEX)


def conditional(reader: Reader, kept: dict[str, Any], given: Mapping[str, Any], path: Path) -> None:
    """Hold `if` where it asks for the value of one listed property; others are noted."""
    condition, _ = reader.resolved(given["if"], (*path, "if"))
    branches = [reader.schema(given.get(key, True), (*path, key)) for key in ("then", "else")]
    if isinstance(condition, bool):
        return _add(kept, branches[0 if condition else 1])
    properties = condition.get("properties") if isinstance(condition, dict) else None
    if (
        not isinstance(properties, dict)
        or len(properties) != 1
        or condition.keys() - {"properties", "required", "type"}
    ):
        raise NotHeld(_TOO_COMPLEX)
    ((name, asked),) = cast("dict[str, Any]", properties).items()
    own, at = given.get("properties"), (*path, "properties", name)
    listed = listed_values(reader.resolved(own[name], at)[0]) if isinstance(own, dict) and name in own else None
    values = listed_values(asked)
    if listed is None or values is None or not is_exact(listed) or kinds_of(reader, dict(given), path) != ONLY_OBJECTS:
        raise NotHeld(_TOO_COMPLEX)
    if set(required_of(condition)) - {name} or asked.keys() - _LISTING or not _allows_objects(condition):
        raise NotHeld(_TOO_COMPLEX)
    reader.write_out(len(json.dumps(listed)))
    branches = [reader.shared(branch) for branch in branches]  # one of them is repeated
    wanted = set(map(spelled, values))
    yes = [value for value in listed if spelled(value) in wanted]
    no = [value for value in listed if spelled(value) not in wanted]
    is_needed = name in required_of(condition)
    absent = {"allOf": [{"properties": {name: False}}, branches[1 if is_needed else 0]]}
    parts = [_where(name, yes, branches[0]), _where(name, no, branches[1]), absent]
    usable = [values for values in (yes, no) if values]
    kept_parts = [part for part, has_values in zip(parts, (yes, no, True), strict=True) if has_values]
    _add(kept, {"anyOf": kept_parts if name not in required_of(given) else kept_parts[: len(usable)]})
    return None


def _allows_objects(schema: Mapping[str, Any]) -> bool:
    names = schema.get("type", "object")
    return "object" in (names if isinstance(names, list) else [names])


def _where(name: str, values: list[Any], then: Any) -> dict[str, Any]:
    return {"allOf": [{"properties": {name: {"enum": plain_constant(values)}}, "required": [name]}, then]}


def dependent(reader: Reader, kept: dict[str, Any], key: str, given: Mapping[str, Any], path: Path) -> None:
    """Hold `dependentRequired` and `dependentSchemas`: a property is absent, or what depends on it holds."""
    named = cast("dict[str, Any]", checked(dict, given[key], "an object by name"))
    if len(named) > _MAX_DEPENDENCIES:
        raise NotHeld(_TOO_COMPLEX)
    for name, value in named.items():
        if key == "dependentRequired":
            needed = checked(list, value, "a list of names")
            present: Any = {"required": [name, *(checked(str, one, "a name") for one in needed)]}
        else:
            present = {"allOf": [{"required": [name]}, reader.schema(value, (*path, key, name))]}
        if name in required_of(given):
            _add(kept, present)
        else:
            _add(kept, {"anyOf": [{"properties": {name: False}}, present]})


def _add(kept: dict[str, Any], part: Any) -> None:
    if part is not True:
        kept.setdefault("allOf", []).append(part)
