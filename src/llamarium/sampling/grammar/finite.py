"""Finds references of a JSON schema that no finite value fits.

`{"$ref": "#"}` is one, and an object that requires a property of its own kind. A grammar accepts them: an answer would
begin, and could never be complete.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

Path = tuple[str, ...]


def endless(schemas: Mapping[Path, Any], targets: Mapping[Path, Path]) -> set[Path]:
    """Return the paths of schemas that no finite value fits, because of references; `targets` are those of each `$ref`.

    A schema is finite once those that it needs are; the rest are circles.
    """
    needed_by: dict[Path, list[Path]] = defaultdict(list)
    for path, schema in schemas.items():
        for inner in _looked_at(path, schema, targets):
            needed_by[inner].append(path)
    ending: set[Path] = set()
    waiting = list(schemas)
    while waiting:
        path = waiting.pop()
        if path not in ending and _ends(path, schemas[path], targets, ending):
            ending.add(path)
            waiting += needed_by[path]
    return schemas.keys() - ending


def _looked_at(path: Path, schema: Any, targets: Mapping[Path, Path]) -> Iterator[Path]:
    """Yield the schemas that one depends on."""
    if not isinstance(schema, dict):
        return
    if path in targets:
        yield targets[path]
    for key in ("allOf", "anyOf", "oneOf", "prefixItems"):
        yield from ((*path, key, str(i)) for i in range(len(schema.get(key, ()))))
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield (*path, key)
    yield from ((*path, "properties", name) for name in schema.get("properties", ()))


def _ends(path: Path, schema: Any, targets: Mapping[Path, Path], ending: set[Path]) -> bool:
    if not isinstance(schema, dict):
        return bool(schema)
    if path in targets and targets[path] not in ending:
        return False
    if any((*path, "allOf", str(i)) not in ending for i in range(len(schema.get("allOf", ())))):
        return False
    for key in ("anyOf", "oneOf"):
        if key in schema and not any((*path, key, str(i)) in ending for i in range(len(schema[key]))):
            return False
    if "const" in schema or "enum" in schema:
        return True
    types = schema.get("type", "null")
    types = [types] if isinstance(types, str) else types
    return any(_type_ends(name, path, schema, ending) for name in types)


def _type_ends(name: str, path: Path, schema: Mapping[str, Any], ending: set[Path]) -> bool:
    if name == "array":
        fixed, least = len(schema.get("prefixItems", ())), schema.get("minItems", 0)
        needed: list[Path] = [(*path, "prefixItems", str(i)) for i in range(min(fixed, int(least)))]
        if least > fixed and "items" in schema:
            needed.append((*path, "items"))
        return all(inner in ending for inner in needed)
    if name == "object":
        named = schema.get("properties", {})
        required = {(*path, "properties", key) for key in schema.get("required", ()) if key in named}
        return required <= ending
    return True
