"""Keywords of objects and arrays that a grammar does not have, in words that it has."""

import json
from collections.abc import Mapping
from itertools import permutations
from typing import Any, cast

from llamarium.errors import GrammarLimitError
from llamarium.sampling.grammar.schema.disjoint import listed_values, spelled
from llamarium.sampling.grammar.schema.formats import FORMATS
from llamarium.sampling.grammar.schema.patterns import PatternError, translated
from llamarium.sampling.grammar.schema.reader import Reader
from llamarium.sampling.grammar.schema.unenforced import Path, pointer
from llamarium.sampling.grammar.schema.values import NotHeld, checked, count, plain_constant

MAX_OPTIONAL = 400
"""Optional properties of an object; each is four items of llguidance's parser, which allows 2,000."""
_MAX_UNIQUE = 4
"""Different values of which every list without repetition is written out: 65 of them."""

_LISTING = frozenset(("enum", "const", "type", "title", "description", "$comment"))


def property_names(reader: Reader, kept: dict[str, Any], given: Mapping[str, Any], path: Path) -> None:
    """Hold `propertyNames` where it lists names, or has one pattern for those of a mapping."""
    names, _ = reader.resolved(given["propertyNames"], (*path, "propertyNames"))
    if names is False:
        kept["maxProperties"] = 0
        return
    schema = {} if names is True else cast("dict[str, Any]", checked(dict, names, "a schema"))
    listed = listed_values(schema)
    if listed is not None:
        if schema.keys() - _LISTING or schema.get("type", "string") != "string":
            raise NotHeld("has other keywords beside its list of names")
        _list_names(reader, kept, [name for name in listed if isinstance(name, str)])
        return
    expressions = _expressions(schema)
    if not expressions:
        return
    if len(expressions) > 1 or kept.get("properties") or kept.get("patternProperties") or kept.get("required"):
        raise NotHeld("is held for mappings, by a list of names or by one pattern")
    values = kept.pop("additionalProperties", True)
    kept |= {"patternProperties": {expressions[0]: values}, "additionalProperties": False}


def _list_names(reader: Reader, kept: dict[str, Any], names: list[str]) -> None:
    if kept.get("patternProperties"):
        raise NotHeld("is not held beside patternProperties")
    others, own = reader.shared(kept.get("additionalProperties", True)), kept.get("properties", {})
    reader.write_out(sum(map(len, names)) + len(names) * len(json.dumps(others)))
    listed = {name: own.get(name, others) for name in names}
    kept["properties"] = listed | {name: False for name in own if name not in listed}
    kept["additionalProperties"] = False


def _expressions(schema: Mapping[str, Any]) -> list[str]:
    """Return the expressions that hold a schema of names."""
    others = schema.keys() & {"allOf", "anyOf", "oneOf", "not", "$ref", "if"}
    if others or schema.get("type", "string") != "string":
        raise NotHeld("is held for mappings, by a list of names or by one pattern")
    expressions: list[str] = []
    if "pattern" in schema:
        try:
            expressions.append(translated(checked(str, schema["pattern"], "a regular expression")))
        except PatternError as error:
            raise NotHeld(f"has a pattern that {error}") from None
    if schema.get("format") in FORMATS:
        expressions.append(f"^(?:{FORMATS[schema['format']]})$")
    least, most = count(schema.get("minLength", 0)), schema.get("maxLength")
    if least or most is not None:
        expressions.append(f"^(?s:.{{{least},{'' if most is None else count(most)}}})$")
    return expressions


def count_properties(reader: Reader, kept: dict[str, Any], path: Path) -> None:
    """Keep `minProperties` and `maxProperties` where they can be counted, and note them elsewhere."""
    named, required = kept.get("properties", {}), set(kept.get("required", ()))
    optional = [name for name, schema in named.items() if name not in required and schema is not False]
    if len(optional) > MAX_OPTIONAL:
        raise GrammarLimitError(
            f"the JSON schema, at {pointer(path)}: {len(optional):,} properties can be left out; "
            f"at most {MAX_OPTIONAL} may"
        )
    is_closed = kept.get("additionalProperties") is False and not kept.get("patternProperties")
    least, most = kept.get("minProperties", 0), kept.get("maxProperties")
    if least <= len(required):
        kept.pop("minProperties", None)
    elif least > len(required) + 1 and not (is_closed and least == len(required) + len(optional)):
        kept.pop("minProperties")
        reader.note(path, "minProperties", "can be counted up to one more than the required properties")
    elif least > len(required) + 1 or (is_closed and len(optional) == 1):
        kept["required"] = [*kept.get("required", []), *optional]
        kept.pop("minProperties")
    elif optional and not is_closed and "additionalProperties" not in kept and not kept.get("patternProperties"):
        kept["additionalProperties"] = False
    if most is not None and is_closed and most >= len(required) + len(optional):
        kept.pop("maxProperties")
    _note_uncounted(reader, kept, optional, path)


def _note_uncounted(reader: Reader, kept: dict[str, Any], optional: list[str], path: Path) -> None:
    """Note counts beside optional properties, of which llguidance counts one."""
    if not optional:
        return
    is_closed = kept.get("additionalProperties") is False and not kept.get("patternProperties")
    num_required = len(set(kept.get("required", ())))
    most = kept.get("maxProperties")
    for key in ("minProperties", "maxProperties"):
        if key in kept and (not is_closed or (most is not None and most != num_required + 1)):
            del kept[key]
            reader.note(path, key, "is not counted beside optional properties")


def unique_items(reader: Reader, kept: dict[str, Any], given: Mapping[str, Any], path: Path) -> None:
    """Hold `uniqueItems` where few values are listed: every list of different ones is written out."""
    if given["uniqueItems"] is not True or kept.get("maxItems", 2) <= 1:
        return
    items, _ = reader.resolved(given.get("items", True), (*path, "items"))
    listed = listed_values(items)
    if listed is None and isinstance(items, dict) and items.get("type") in ("boolean", "null"):
        listed = [False, True] if items["type"] == "boolean" else [None]
    if listed is None or kept.get("type") != ["array"] or kept.keys() & {"prefixItems", "enum", "const"}:
        raise NotHeld("is held for arrays of a few listed values")
    values = list({spelled(value): plain_constant(value) for value in listed}.values())
    least, most = kept.get("minItems", 0), min(kept.get("maxItems", len(values)), len(values))
    if len(values) > _MAX_UNIQUE:
        raise NotHeld(f"is held for up to {_MAX_UNIQUE} listed values")
    item = reader.shared(kept.pop("items"))
    each = [reader.shared({"allOf": [{"const": value}, item]}) for value in values]
    lists = [_array(list(chosen)) for length in range(least, most + 1) for chosen in permutations(each, length)]
    kept.setdefault("allOf", []).append(reader.shared({"anyOf": lists}))


def _array(items: list[Any]) -> dict[str, Any]:
    same = {"minItems": len(items), "maxItems": len(items)}
    return {"type": ["array"], **({"prefixItems": items} if items else {}), "items": False, **same}


def unevaluated(reader: Reader, kept: dict[str, Any], key: str, given: Mapping[str, Any], path: Path) -> None:
    """Hold what is said of properties or items that no other keyword speaks of, where all of those stand beside it."""
    if given[key] is True:
        return
    if given.keys() & {"allOf", "anyOf", "oneOf", "not", "if", "$ref", "dependentSchemas", "contains"}:
        raise NotHeld("is not held beside keywords that join schemas")
    name = "additionalProperties" if key == "unevaluatedProperties" else "items"
    is_tuple = isinstance(given.get("items"), list) and "additionalItems" not in given  # draft 2019-09
    if name not in given or (name == "items" and is_tuple):
        kept[name] = reader.schema(given[key], (*path, key))


def contains(reader: Reader, kept: dict[str, Any], given: Mapping[str, Any], path: Path) -> None:
    """Hold `contains` where every item follows it anyway."""
    least, most = given.get("minContains", 1), given.get("maxContains")
    if given["contains"] is True and most is None and isinstance(least, int):
        kept["minItems"] = max(kept.get("minItems", 0), least)
    elif least != 0 or most is not None:
        raise NotHeld("is not supported")
