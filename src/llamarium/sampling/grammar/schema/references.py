"""Where a `$ref` leads within one document: JSON pointers, `$anchor`, and `$id` of schemas inside.

Nothing is fetched. Source: JSON Schema 2020-12, core, 8.2 (identifiers and references); RFC 6901 (JSON Pointer).
"""

from collections.abc import Iterator
from typing import Any, cast
from urllib.parse import unquote, urldefrag, urljoin

from llamarium.sampling.grammar.schema.unenforced import Path

_ANCHORS = ("$anchor", "$dynamicAnchor")
_LONGEST_INDEX = 9
_DATA = frozenset(("enum", "const", "default", "examples", "example"))


class References:
    """The references of one document."""

    def __init__(self, document: Any) -> None:
        self._document = document
        self._bases: dict[Path, str] = {(): ""}
        self._by_name = dict(self._names())

    def target(self, reference: str, place: Path) -> Path | None:
        """Return the path of the schema that a reference at a place leads to, or None if there is none."""
        resource = self._resource(place)
        if reference == "#" or reference.startswith("#/"):
            return self._pointed(resource, reference[1:])
        base, fragment = _joined(self._bases[resource], reference)
        if fragment and not fragment.startswith("/"):
            return self._by_name.get(f"{base}#{fragment}")
        root = () if base == self._bases[()] else self._by_name.get(base)
        return None if root is None else self._pointed(root, fragment)

    def at(self, path: Path) -> Any:
        """Return the value at a path of the document."""
        return _at(self._document, path)

    def _resource(self, place: Path) -> Path:
        """Return the path of the innermost schema with an identifier that a place lies in."""
        return next(place[:length] for length in range(len(place), -1, -1) if place[:length] in self._bases)

    def _pointed(self, root: Path, fragment: str) -> Path | None:
        steps = [_unescaped(step) for step in fragment.split("/")[1:]]
        at: Any = _at(self._document, root)
        for step in steps:
            if isinstance(at, dict) and step in at:
                at = cast("dict[str, Any]", at)[step]
            elif isinstance(at, list) and _is_index(step) and int(step) < len(cast("list[Any]", at)):
                at = cast("list[Any]", at)[int(step)]
            else:
                return None
        return (*root, *steps) if isinstance(at, dict | bool) else None

    def _names(self) -> Iterator[tuple[str, Path]]:
        """Yield the absolute names of schemas, with their paths."""
        waiting: list[tuple[Any, Path, str]] = [(self._document, (), "")]
        while waiting:
            value, path, base = waiting.pop()
            if isinstance(value, dict):
                schema = cast("dict[str, Any]", value)
                identifier = schema.get("$id")
                if isinstance(identifier, str) and not identifier.startswith("#"):
                    base, _ = _joined(base, identifier)
                    self._bases[path] = base
                    yield base, path
                names = [schema[key] for key in _ANCHORS if isinstance(schema.get(key), str)]
                if isinstance(identifier, str) and identifier.startswith("#"):  # draft 7's anchors
                    names.append(identifier[1:])
                yield from ((f"{base}#{name}", path) for name in names)
                waiting += [(inner, (*path, key), base) for key, inner in schema.items() if key not in _DATA]
            elif isinstance(value, list):
                waiting += [(inner, (*path, str(i)), base) for i, inner in enumerate(cast("list[Any]", value))]


def _at(document: Any, path: Path) -> Any:
    for step in path:
        document = document[int(step)] if isinstance(document, list) else document[step]
    return document


def _joined(base: str, reference: str) -> tuple[str, str]:
    """Return an absolute address, and its fragment."""
    try:
        address, fragment = urldefrag(urljoin(base, reference))
    except ValueError:  # a malformed address in brackets
        address, _, fragment = reference.partition("#")
    return address, fragment


def _is_index(step: str) -> bool:
    """Return whether a step is the place of an item: RFC 6901 allows no leading zeros."""
    is_number = step.isascii() and step.isdecimal() and len(step) <= _LONGEST_INDEX
    return is_number and (step == "0" or not step.startswith("0"))


def _unescaped(step: str) -> str:
    return unquote(step).replace("~1", "/").replace("~0", "~")
