"""Lowering of JSON schemas to the keywords that llguidance enforces, and the list of those that it does not.

llguidance ignores unknown keywords, lets a schema relax validation (`x-guidance`), and deviates from the standard in
some keywords. Therefore `lowered` returns a schema with only the keywords whose meaning is the same; `schema/` converts
the others to them.

The result accepts only values that the schema accepts, except for keywords that are reported as unenforced. It may
accept fewer: properties are in the schema's order, integers have no decimal point, characters are escaped only if
necessary, and an object has no other properties than those listed, if its schema does not mention others.

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
"""Maximum nesting of schemas; each has two levels of JSON, a keyword and a name."""

_BLANKS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}"}  # bounded, because some models generate blanks endlessly


@dataclass(frozen=True, slots=True)
class Lowered:
    """A lowered schema, with only keywords that llguidance enforces.

    Attributes:
        schema: An object, true or false.
        unenforced: Keywords of the original schema that are not enforced.
    """

    schema: Any
    unenforced: tuple[UnenforcedKeyword, ...] = ()


def parsed(text: str) -> Any:
    """Parse the JSON text of a schema; GrammarError if it is invalid, GrammarLimitError if it is nested too deeply."""
    try:
        return parse_json(text, max_levels=2 * MAX_DEPTH, portable=True)
    except TooDeepJson:
        raise GrammarLimitError(f"the JSON schema is nested deeper than {MAX_DEPTH} schemas; make it flatter") from None
    except NotJson as error:
        raise GrammarError(f"the JSON schema is no JSON: {error}") from None


def rule(schema: Any, separators: tuple[str, str] | None = None) -> str:
    """Return the body of a Lark rule for a lowered schema.

    With `separators` (item and key), those are the only blanks; otherwise blanks are flexible.
    """
    keywords = schema if isinstance(schema, dict) else {"allOf": [schema]}
    names = ("item_separator", "key_separator")
    blanks = {"whitespace_flexible": False, **dict(zip(names, separators, strict=True))} if separators else _BLANKS
    return f"%json {json.dumps({**keywords, 'x-guidance': blanks})}"


def lowered(schema: Any, *, open_objects: bool = False, strict: bool = False, tolerant: bool = False) -> Lowered:
    """Lower a schema to the keywords that llguidance enforces.

    Args:
        schema: The parsed schema, nested up to `MAX_DEPTH`.
        open_objects: Allow objects to have properties that are not listed if the schema does not have
            `additionalProperties`.
        strict: Raise GrammarError for a restriction that cannot be enforced, instead of listing it.
        tolerant: List keywords with invalid values (`"type": "int"`) too, unless `strict`.

    Raises:
        GrammarError: If the schema is invalid, or no finite value satisfies it; the message names the place.
        GrammarLimitError: If it is too large.
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
