"""Lowers a JSON schema to keywords that a grammar enforces, in one walk.

Keywords without restrictions are skipped. One with a restriction is kept, replaced by keywords that accept no more
values, or noted as unenforced. Only schemas reachable from the root are read. Each `$ref` refers
to a definition of the result, so it can point anywhere in the document.
"""

import difflib
import json
from collections.abc import Callable, Mapping
from typing import Any, cast

from llamarium.errors import GrammarLimitError, show_value
from llamarium.sampling.grammar.schema import applicators, dialects, objects, values
from llamarium.sampling.grammar.schema.formats import with_format
from llamarium.sampling.grammar.schema.lookaheads import split
from llamarium.sampling.grammar.schema.patterns import PatternError, translated
from llamarium.sampling.grammar.schema.references import References
from llamarium.sampling.grammar.schema.unenforced import Path, UnenforcedKeyword, pointer, refused
from llamarium.sampling.grammar.schema.values import NotEnforceable, ValueFault, checked

MAX_SCHEMAS = 5000
"""Schemas within a schema; llguidance recurses over them, within the stack of `workers.py`."""
MAX_COMPARISONS = 20_000
"""Steps of proofs that branches of `oneOf` do not overlap: a tenth of a second."""

MAX_LOWERED = 512 * 1024
"""Characters of a lowered schema, and of what the result repeats or writes out."""
_NAMES_PER_STEP = 16
_LONGEST_REPEATED = 64
"""Characters of a schema that is repeated rather than referred to."""

_NO_RESTRICTIONS = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema", "$id",
     "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$vocabulary", "$defs", "definitions", "contentEncoding",
     "contentMediaType", "contentSchema", "discriminator", "example", "externalDocs", "xml", "minContains",
     "maxContains", "then", "else", "enumNames", "enumDescriptions")
)  # fmt: skip
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")


class Reading:
    """The state of reading one document.

    Attributes:
        definitions: What `$ref`s of the result lead to, by name.
        places: Where each of the result's references first stands.
        unenforced: The keywords that are not enforced.
    """

    def __init__(self, document: Any, *, strict: bool = False, tolerant: bool = False) -> None:
        self.references = References(document)
        self.definitions: dict[str, Any] = {}
        self.places: dict[str, Path] = {}
        self.unenforced: list[UnenforcedKeyword] = []
        self._strict = strict
        self._tolerant = tolerant
        self._references: dict[Path, str] = {(): "#"}
        self._waiting: list[tuple[str, Path]] = []
        self._num_schemas = 0
        self._num_comparisons = 0
        self._num_written = 0
        self._shared: dict[str, str] = {}

    def read(self) -> Any:
        """Return the lowered root, and read the schemas that it refers to."""
        root = self.schema(self.references.at(()), ())
        while self._waiting:
            name, path = self._waiting.pop()
            self.definitions[name] = self.schema(self.references.at(path), path)
        return root

    def note(self, path: Path, keyword: str, reason: str) -> None:
        """Note that a keyword of the schema at a path is not enforced; GrammarError if it has to be."""
        if self._strict:
            raise refused(path, f"{keyword} {reason}")
        self.unenforced.append(UnenforcedKeyword(pointer(path), keyword, reason))

    def note_fault(self, path: Path, keyword: str, reason: str) -> None:
        """Note that a keyword has no value of its kind; GrammarError unless the schema may have faults."""
        if not self._tolerant:
            raise refused(path, f"{keyword} {reason}")
        self.note(path, keyword, reason)

    def resolved(self, schema: Any, path: Path) -> tuple[Any, Path]:
        """Follow references without other keywords; a circle ends anywhere in it."""
        visited = set[Path]()
        while isinstance(schema, dict) and isinstance(schema.get("$ref"), str) and path not in visited:
            visited.add(path)
            target = self.references.target(cast("str", schema["$ref"]), path)
            if target is None:
                break
            schema, path = self.references.at(target), target
        return schema, path

    def may_compare(self, num_names: int = 0) -> bool:
        """Count a step of a comparison of schemas, or of lists of names, and return whether there may be another."""
        self._num_comparisons += 1 + num_names // _NAMES_PER_STEP
        return self._num_comparisons <= MAX_COMPARISONS

    def write_out(self, num_characters: int) -> None:
        """Count characters that the result has and the document does not; GrammarLimitError if they are too many."""
        self._num_written += num_characters
        if self._num_written > MAX_LOWERED:
            raise GrammarLimitError(
                f"the JSON schema needs more than {MAX_LOWERED:,} characters when its lists are written out; "
                "make it smaller"
            )

    def shared(self, lowered: Any) -> Any:
        """Return a lowered schema for repeated use: a long one becomes a reference to a definition."""
        text = json.dumps(lowered)
        if len(text) <= _LONGEST_REPEATED:
            return lowered
        if text not in self._shared:
            self.write_out(len(text))
            name = f"s{len(self._shared)}"
            self._shared[text] = f"#/$defs/{name}"
            self.definitions[name] = lowered
        return {"$ref": self._shared[text]}

    def schema(self, schema: Any, path: Path) -> Any:
        """Return a schema lowered to keywords that grammars enforce."""
        self._num_schemas += 1
        if self._num_schemas > MAX_SCHEMAS:
            raise GrammarLimitError(f"the JSON schema is made of more than {MAX_SCHEMAS:,} schemas; make it smaller")
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            self.note_fault(path[:-1], path[-1] if path else "the schema", _NO_SCHEMA.format(show_value(schema)))
            return True
        current, accepts_null = dialects.current(cast("dict[str, Any]", schema))
        lowered = self._keywords(current, path)
        return applicators.or_null(lowered) if accepts_null else lowered

    def _keywords(self, schema: Mapping[str, Any], path: Path) -> Any:
        """Read simple keywords in their order, then those that depend on others."""
        lowered: dict[str, Any] = {}
        for key in schema:
            if not (key in _NO_RESTRICTIONS or key in _LATER or key.startswith("x-")):
                self._try(path, key, lambda key=key: self._keyword(lowered, key, schema, path))
        for key in _LATER:
            if key in schema:
                self._try(path, key, lambda key=key: _LATER[key](self, lowered, key, schema, path))
        lowered = with_format(lowered)
        objects.count_properties(self, lowered, path)
        return simplified(lowered)

    def _try(self, path: Path, key: str, read: Callable[[], None]) -> None:
        try:
            read()
        except ValueFault as fault:
            self.note_fault(path, key, str(fault))
        except NotEnforceable as reason:
            self.note(path, key, str(reason))

    def _keyword(self, lowered: dict[str, Any], key: str, schema: Mapping[str, Any], path: Path) -> None:
        """Lower one keyword; ValueFault or NotEnforceable if that is impossible."""
        if key in _VALUES:
            lowered[key] = _VALUES[key](schema[key])
        elif key in _HANDLERS:
            _HANDLERS[key](self, lowered, key, schema, path)
        elif similar := difflib.get_close_matches(key, _RESTRICTIONS, n=1, cutoff=0.85):
            raise ValueFault(f"is no keyword; did you mean {similar[0]}?")

    def refer(self, target: Path, place: Path) -> str:
        """Return a reference of the result to the schema at a path."""
        if target not in self._references:
            name = f"d{len(self._references)}"
            self._references[target] = f"#/$defs/{name}"
            self._waiting.append((name, target))
        reference = self._references[target]
        self.places.setdefault(reference, place)
        return reference


_NO_SCHEMA = "is {}; expected a schema: an object, true or false"
_Handler = Callable[[Reading, dict[str, Any], str, Mapping[str, Any], Path], None]


def _limit(reading: Reading, lowered: dict[str, Any], key: str, schema: Mapping[str, Any], path: Path) -> None:
    types = schema.get("type")
    names = types if isinstance(types, list) else [types]
    name, number = values.limit(key, schema[key], whole="integer" in names and "number" not in names)
    nearer = max if name in values.LOWER else min
    lowered[name] = nearer(lowered.get(name, number), number)


def _enum(value: Any) -> list[Any]:
    return [_constant(constant) for constant in checked(list, value, "a list of values")]


def _constant(value: Any) -> Any:
    if not values.is_exact(value):
        raise NotEnforceable("has a number of too many digits for a grammar")
    return values.plain_constant(value)


def _required(value: Any) -> list[str]:
    names = checked(list, value, "a list of names")
    return list(dict.fromkeys(checked(str, name, "a list of names") for name in names))


def _pattern(value: Any) -> str:
    text = checked(str, value, "a regular expression")
    try:
        return translated(text)
    except PatternError as error:
        raise NotEnforceable(f"is {show_value(text)}, which {error}") from None


def _patterns(reading: Reading, lowered: dict[str, Any], key: str, schema: Mapping[str, Any], path: Path) -> None:
    text = checked(str, schema[key], "a regular expression")
    try:
        *lookaheads, lowered[key] = map(translated, split(text))
    except PatternError as error:
        raise NotEnforceable(f"is {show_value(text)}, which {error}") from None
    if lookaheads:
        lowered["allOf"] = lowered.get("allOf", []) + [{"pattern": lookahead} for lookahead in lookaheads]


def _schema(reading: Reading, lowered: dict[str, Any], key: str, schema: Mapping[str, Any], path: Path) -> None:
    if key == "items" and isinstance(schema[key], list):  # draft 7's tuples
        listed = cast("list[Any]", schema[key])
        lowered["prefixItems"] = [reading.schema(item, (*path, key, str(i))) for i, item in enumerate(listed)]
    else:
        lowered[key] = reading.schema(schema[key], (*path, key))


def _schemas(reading: Reading, lowered: dict[str, Any], key: str, schema: Mapping[str, Any], path: Path) -> None:
    listed = checked(list, schema[key], "a list of schemas")
    lowered[key] = lowered.get(key, []) + [
        reading.schema(inner, (*path, key, str(i))) for i, inner in enumerate(listed)
    ]


def _named(reading: Reading, lowered: dict[str, Any], key: str, schema: Mapping[str, Any], path: Path) -> None:
    schemas = cast("dict[str, Any]", checked(dict, schema[key], "an object of schemas by name"))
    rename: Callable[[str], str] = _pattern if key == "patternProperties" else str
    lowered[key] = {rename(name): reading.schema(inner, (*path, key, name)) for name, inner in schemas.items()}


def _additional_items(
    reading: Reading, lowered: dict[str, Any], key: str, schema: Mapping[str, Any], path: Path
) -> None:
    if isinstance(schema.get("items"), list):  # beside a schema it has no effect
        lowered["items"] = reading.schema(schema[key], (*path, key))


def _reference(reading: Reading, lowered: dict[str, Any], key: str, schema: Mapping[str, Any], path: Path) -> None:
    text = checked(str, schema[key], "a reference")
    target = reading.references.target(text, path)
    if target is None:
        raise NotEnforceable(f"is {show_value(text)}, and there is no such schema in this document")
    lowered["$ref"] = reading.refer(target, path)


def _of_schema(read: Callable[[Reading, dict[str, Any], Mapping[str, Any], Path], Any]) -> _Handler:
    """Return the handler of a keyword that is read by its own function."""
    return lambda reading, lowered, key, schema, path: read(reading, lowered, schema, path)


def _negated(reading: Reading, lowered: dict[str, Any], schema: Mapping[str, Any], path: Path) -> None:
    if applicators.negated(reading, lowered, schema, path):
        lowered["allOf"] = [*lowered.get("allOf", []), False]


_VALUES: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(_COUNTS, values.count),
    "multipleOf": values.multiple,
    "type": values.types_of,
    "enum": _enum,
    "const": _constant,
    "required": _required,
    "format": lambda value: checked(str, value, "a name"),
}
_HANDLERS: Mapping[str, _Handler] = {
    **dict.fromkeys((*values.LOWER, *values.UPPER), _limit),
    **dict.fromkeys(("properties", "patternProperties"), _named),
    **dict.fromkeys(("prefixItems", "allOf", "anyOf"), _schemas),
    **dict.fromkeys(("items", "additionalProperties"), _schema),
    "additionalItems": _additional_items,
    "pattern": _patterns,
    **dict.fromkeys(("$ref", "$dynamicRef", "$recursiveRef"), _reference),
}
_LATER: Mapping[str, _Handler] = {
    "oneOf": _of_schema(applicators.one_of),
    "propertyNames": _of_schema(objects.property_names),
    "uniqueItems": _of_schema(objects.unique_items),
    "contains": _of_schema(objects.contains),
    **dict.fromkeys(("unevaluatedProperties", "unevaluatedItems"), objects.unevaluated),
    **dict.fromkeys(("dependentRequired", "dependentSchemas"), applicators.dependent),
    "if": _of_schema(applicators.conditional),
    "not": _of_schema(_negated),
}
_RESTRICTIONS = (*_VALUES, *_HANDLERS, *_LATER, "then", "else")


def simplified(lowered: dict[str, Any]) -> Any:
    """Return a schema without `allOf` around a single one."""
    if lowered.keys() == {"allOf"} and len(lowered["allOf"]) == 1:
        return lowered["allOf"][0]
    return lowered
