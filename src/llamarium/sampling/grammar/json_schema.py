"""JSON schemas as grammars: what llguidance reads, and what of a schema it does not hold.

llguidance ignores unknown keywords, lets a schema choose leniency (`x-guidance`), and reads some keywords unlike the
standard. So `lowered` returns a schema of those keywords alone that have one meaning; `schema/` reads the others.

The result accepts nothing that the schema does not, except by keywords that are named as unenforced. It may accept
less: properties come in the schema's order, integers have no decimal point, characters are escaped only where they must
be, and an object whose schema lists its properties and says nothing of others has no others.

Source: JSON Schema 2020-12, https://json-schema.org/draft/2020-12 (core and validation).
"""

import json
from dataclasses import dataclass
from typing import Any

from llamarium.errors import GrammarError, GrammarLimitError
from llamarium.sampling.grammar.schema.closing import close_objects
from llamarium.sampling.grammar.schema.finite import endless
from llamarium.sampling.grammar.schema.reading import Reading
from llamarium.sampling.grammar.schema.unenforced import UnenforcedKeyword, refused
from llamarium.strict_json import NotJson, TooDeepJson, parse_json

MAX_DEPTH = 64
"""Nested schemas: a keyword and a name for each."""

_BLANKS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}"}  # bounded: some models would write blanks forever


@dataclass(frozen=True, slots=True)
class Lowered:
    """A schema of llguidance's keywords.

    Attributes:
        schema: An object, true or false.
        unenforced: The keywords that it does not hold.
    """

    schema: Any
    unenforced: tuple[UnenforcedKeyword, ...] = ()


def parsed(text: str) -> Any:
    """Read JSON."""
    try:
        return parse_json(text, max_levels=2 * MAX_DEPTH, portable=True)
    except TooDeepJson:
        raise GrammarLimitError(f"the JSON schema is nested deeper than {MAX_DEPTH} schemas; make it flatter") from None
    except NotJson as error:
        raise GrammarError(f"the JSON schema is no JSON: {error}") from None


def rule(schema: Any, separators: tuple[str, str] | None = None) -> str:
    """Return the body of a rule of Lark: a lowered schema, with no blanks but those of `separators`, if given."""
    given = schema if isinstance(schema, dict) else {"allOf": [schema]}
    names = ("item_separator", "key_separator")
    blanks = {"whitespace_flexible": False, **dict(zip(names, separators, strict=True))} if separators else _BLANKS
    return f"%json {json.dumps({**given, 'x-guidance': blanks})}"


def lowered(schema: Any, *, open_objects: bool = False, strict: bool = False, tolerant: bool = False) -> Lowered:
    """Return a JSON value, a schema, in llguidance's keywords.

    Args:
        schema: A JSON value, nested within `MAX_DEPTH`.
        open_objects: Objects whose schemas say nothing of `additionalProperties` may have others than they list.
        strict: A restriction that is not held is a GrammarError rather than named.
        tolerant: Keywords whose values are none of theirs (`"type": "int"`) are named, too, unless `strict`.

    Raises:
        GrammarError: For what is no schema, or what no finite value fits, by the place.
        GrammarLimitError: For one that is too large.
    """
    reading = Reading(schema, strict=strict, tolerant=tolerant and not strict)
    root = reading.read()
    circles = endless(root, reading.definitions)
    for reference, place in reading.places.items():
        if reference in circles:
            raise refused(place, "$ref leads to a schema that no value fits that ends: it needs itself")
    if not open_objects:
        close_objects(root, reading.definitions)
    if reading.definitions:
        root = {**(root if isinstance(root, dict) else {"allOf": [root]}), "$defs": reading.definitions}
    return Lowered(root, tuple(reading.unenforced))
