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
from llamarium.sampling.grammar.schema.values import NotEnforceable, checked, count, plain_constant

MAX_OPTIONAL = 400
"""Optional properties of an object; each is four items of llguidance's parser, which allows 2,000."""
_MAX_UNIQUE = 4
"""Different values of which every list without repetition is written out: 65 of them."""

_LISTING = frozenset(("enum", "const", "type", "title", "description", "$comment"))


def property_names(reader: Reader, lowered: dict[str, Any], schema: Mapping[str, Any], path: Path) -> None:
    """Lower `propertyNames` if it lists names, or has one pattern for those of a mapping."""
    names, _ = reader.resolved(schema["propertyNames"], (*path, "propertyNames"))
    if names is False:
        lowered["maxProperties"] = 0
        return
    names_schema = {} if names is True else cast("dict[str, Any]", checked(dict, names, "a schema"))
    listed = listed_values(names_schema)
    if listed is not None:
        if names_schema.keys() - _LISTING or names_schema.get("type", "string") != "string":
            raise NotEnforceable("has other keywords beside its list of names")
        _list_names(reader, lowered, [name for name in listed if isinstance(name, str)])
        return
    expressions = _expressions(names_schema)
    if not expressions:
        return
    if len(expressions) > 1 or lowered.get("properties") or lowered.get("patternProperties") or lowered.get("required"):
        raise NotEnforceable("is enforced for mappings, by a list of names or by one pattern")
    values = lowered.pop("additionalProperties", True)
    lowered |= {"patternProperties": {expressions[0]: values}, "additionalProperties": False}


def _list_names(reader: Reader, lowered: dict[str, Any], names: list[str]) -> None:
    if lowered.get("patternProperties"):
        raise NotEnforceable("is not enforced beside patternProperties")
    additional, properties = reader.shared(lowered.get("additionalProperties", True)), lowered.get("properties", {})
    reader.write_out(sum(map(len, names)) + len(names) * len(json.dumps(additional)))
    listed = {name: properties.get(name, additional) for name in names}
    lowered["properties"] = listed | {name: False for name in properties if name not in listed}
    lowered["additionalProperties"] = False


def _expressions(schema: Mapping[str, Any]) -> list[str]:
    """Return the regular expressions that enforce a schema of names."""
    applicators = schema.keys() & {"allOf", "anyOf", "oneOf", "not", "$ref", "if"}
    if applicators or schema.get("type", "string") != "string":
        raise NotEnforceable("is enforced for mappings, by a list of names or by one pattern")
    expressions: list[str] = []
    if "pattern" in schema:
        try:
            expressions.append(translated(checked(str, schema["pattern"], "a regular expression")))
        except PatternError as error:
            raise NotEnforceable(f"has a pattern that {error}") from None
    if schema.get("format") in FORMATS:
        expressions.append(f"^(?:{FORMATS[schema['format']]})$")
    minimum, maximum = count(schema.get("minLength", 0)), schema.get("maxLength")
    if minimum or maximum is not None:
        expressions.append(f"^(?s:.{{{minimum},{'' if maximum is None else count(maximum)}}})$")
    return expressions


def count_properties(reader: Reader, lowered: dict[str, Any], path: Path) -> None:
    """Keep `minProperties` and `maxProperties` where they can be counted, and note them elsewhere."""
    properties, required = lowered.get("properties", {}), set(lowered.get("required", ()))
    optional = [name for name, schema in properties.items() if name not in required and schema is not False]
    if len(optional) > MAX_OPTIONAL:
        raise GrammarLimitError(
            f"the JSON schema, at {pointer(path)}: {len(optional):,} properties can be left out; "
            f"at most {MAX_OPTIONAL} may"
        )
    is_closed = lowered.get("additionalProperties") is False and not lowered.get("patternProperties")
    minimum, maximum = lowered.get("minProperties", 0), lowered.get("maxProperties")
    if minimum <= len(required):
        lowered.pop("minProperties", None)
    elif minimum > len(required) + 1 and not (is_closed and minimum == len(required) + len(optional)):
        lowered.pop("minProperties")
        reader.note(path, "minProperties", "can be counted up to one more than the required properties")
    elif minimum > len(required) + 1 or (is_closed and len(optional) == 1):
        lowered["required"] = [*lowered.get("required", []), *optional]
        lowered.pop("minProperties")
    elif optional and not is_closed and "additionalProperties" not in lowered and not lowered.get("patternProperties"):
        lowered["additionalProperties"] = False
    if maximum is not None and is_closed and maximum >= len(required) + len(optional):
        lowered.pop("maxProperties")
    _note_uncounted(reader, lowered, optional, path)


def _note_uncounted(reader: Reader, lowered: dict[str, Any], optional: list[str], path: Path) -> None:
    """Note counts beside optional properties, of which llguidance counts one."""
    if not optional:
        return
    is_closed = lowered.get("additionalProperties") is False and not lowered.get("patternProperties")
    num_required = len(set(lowered.get("required", ())))
    maximum = lowered.get("maxProperties")
    for key in ("minProperties", "maxProperties"):
        if key in lowered and (not is_closed or (maximum is not None and maximum != num_required + 1)):
            del lowered[key]
            reader.note(path, key, "is not counted beside optional properties")


def unique_items(reader: Reader, lowered: dict[str, Any], schema: Mapping[str, Any], path: Path) -> None:
    """Lower `uniqueItems` if few values are listed, by enumerating all lists of different values."""
    if schema["uniqueItems"] is not True or lowered.get("maxItems", 2) <= 1:
        return
    items, _ = reader.resolved(schema.get("items", True), (*path, "items"))
    listed = listed_values(items)
    if listed is None and isinstance(items, dict) and items.get("type") in ("boolean", "null"):
        listed = [False, True] if items["type"] == "boolean" else [None]
    if listed is None or lowered.get("type") != ["array"] or lowered.keys() & {"prefixItems", "enum", "const"}:
        raise NotEnforceable("is enforced for arrays of a few listed values")
    values = list({spelled(value): plain_constant(value) for value in listed}.values())
    minimum, maximum = lowered.get("minItems", 0), min(lowered.get("maxItems", len(values)), len(values))
    if len(values) > _MAX_UNIQUE:
        raise NotEnforceable(f"is enforced for up to {_MAX_UNIQUE} listed values")
    item = reader.shared(lowered.pop("items"))
    constants = [reader.shared({"allOf": [{"const": value}, item]}) for value in values]
    lists = [
        _array(list(chosen)) for length in range(minimum, maximum + 1) for chosen in permutations(constants, length)
    ]
    lowered.setdefault("allOf", []).append(reader.shared({"anyOf": lists}))


def _array(items: list[Any]) -> dict[str, Any]:
    length = {"minItems": len(items), "maxItems": len(items)}
    return {"type": ["array"], **({"prefixItems": items} if items else {}), "items": False, **length}


def unevaluated(reader: Reader, lowered: dict[str, Any], key: str, schema: Mapping[str, Any], path: Path) -> None:
    """Lower `unevaluatedProperties` or `unevaluatedItems` if all keywords that could evaluate them are siblings."""
    if schema[key] is True:
        return
    if schema.keys() & {"allOf", "anyOf", "oneOf", "not", "if", "$ref", "dependentSchemas", "contains"}:
        raise NotEnforceable("is not enforced beside keywords that join schemas")
    name = "additionalProperties" if key == "unevaluatedProperties" else "items"
    is_tuple = isinstance(schema.get("items"), list) and "additionalItems" not in schema  # draft 2019-09
    if name not in schema or (name == "items" and is_tuple):
        lowered[name] = reader.schema(schema[key], (*path, key))


def contains(reader: Reader, lowered: dict[str, Any], schema: Mapping[str, Any], path: Path) -> None:
    """Lower `contains` if all items satisfy it anyway."""
    minimum, maximum = schema.get("minContains", 1), schema.get("maxContains")
    if schema["contains"] is True and maximum is None and isinstance(minimum, int):
        lowered["minItems"] = max(lowered.get("minItems", 0), minimum)
    elif minimum != 0 or maximum is not None:
        raise NotEnforceable("is not supported")
