"""Schemas as libraries write them: they compile, and every answer that ends is valid by `jsonschema`.

Answers are random walks over the grammar: what a grammar would let through, they find.
"""

import datetime
import decimal
import enum
import ipaddress
import json
import pathlib
import re
import uuid
from collections.abc import Callable
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from pydantic import (
    AnyUrl,
    Base64Bytes,
    BaseModel,
    ByteSize,
    Field,
    HttpUrl,
    Json,
    PostgresDsn,
    SecretStr,
    TypeAdapter,
    types,
)

from grammar_walk import character_compiler, finished_answers
from llamarium.sampling.grammar.compiler import GrammarCompiler
from llamarium.sampling.grammar.description import Grammar
from tool_schemas import NAMED, TOOL_SCHEMAS

NUM_ANSWERS = 12
D7 = {"$schema": "http://json-schema.org/draft-07/schema#"}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return character_compiler()


def check_answers(compiler: GrammarCompiler, schema: Any, oracle: Any = None, count: int = NUM_ANSWERS) -> list[Any]:
    """Check random answers of a schema by the oracle of its dialect, and return their values."""
    grammar = Grammar.json_schema(schema)
    assert grammar.unenforced == ()
    compiled = compiler.compile(grammar)
    validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    checks = (oracle or validator)(schema, format_checker=validator.FORMAT_CHECKER)
    values = [json.loads(text) for text in finished_answers(compiler, compiled, count)]
    for value in values:
        checks.validate(value)
    assert values
    return values


# --- tools ------------------------------------------------------------------------------------------------------------


def null_beside(keyword: str) -> Callable[..., Any]:
    """Be a keyword of OpenAPI 3.0 that `nullable` stands beside."""

    def check(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
        if not (schema.get("nullable") and instance is None):
            yield from jsonschema.Draft202012Validator.VALIDATORS[keyword](validator, value, instance, schema)

    return check


def exclusive(limit: str, is_outside: Callable[[Any, Any], bool]) -> Callable[..., Any]:
    """Be the exclusive limit of OpenAPI 3.0 and draft 4, a flag beside the inclusive one."""

    def check(validator: Any, flag: Any, instance: Any, schema: Any) -> Any:
        if flag is True and validator.is_type(instance, "number") and is_outside(instance, schema[limit]):
            yield jsonschema.ValidationError(f"{instance} is the excluded limit")

    return check


OPENAPI_3_0 = jsonschema.validators.extend(
    jsonschema.Draft202012Validator,
    {
        "type": null_beside("type"),
        "allOf": null_beside("allOf"),
        "exclusiveMinimum": exclusive("minimum", lambda value, limit: value <= limit),
        "exclusiveMaximum": exclusive("maximum", lambda value, limit: value >= limit),
    },
)


@pytest.mark.parametrize("name", [name for name in TOOL_SCHEMAS if name not in NAMED])
def test_a_tools_arguments_follow_their_schema(compiler: GrammarCompiler, name: str) -> None:
    oracle = OPENAPI_3_0 if name in ("create_page", "add_task", "schedule_job") else None
    if name == "schedule_job":  # \S+ has no end that chance would find
        assert compiler.compile(Grammar.json_schema(TOOL_SCHEMAS[name]))
    else:
        check_answers(compiler, TOOL_SCHEMAS[name], oracle)


def test_of_sixty_tools_all_but_two_are_held_fully_and_those_name_what_is_not(compiler: GrammarCompiler) -> None:
    grammars = {name: Grammar.json_schema(schema, tolerant=True) for name, schema in TOOL_SCHEMAS.items()}
    for grammar in grammars.values():
        compiler.compile(grammar)
    named = {name: [str(one) for one in grammar.unenforced] for name, grammar in grammars.items() if grammar.unenforced}
    assert named == NAMED
    assert len(TOOL_SCHEMAS) >= 60 and 1 - len(named) / len(TOOL_SCHEMAS) >= 0.95


# --- Pydantic ---------------------------------------------------------------------------------------------------------


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    weight: float = 1.0


class Node(BaseModel):
    value: int
    children: list["Node"] = []


PYDANTIC: dict[str, Any] = {
    "bool": bool,
    "int": int,
    "float": float,
    "str": str,
    "date": datetime.date,
    "datetime": datetime.datetime,
    "time": datetime.time,
    "timedelta": datetime.timedelta,
    "decimal": decimal.Decimal,
    "uuid": uuid.UUID,
    "uuid4": types.UUID4,
    "bytes": bytes,
    "base64": Base64Bytes,
    "path": pathlib.Path,
    "secret": SecretStr,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "network": ipaddress.IPv4Network,
    "url": AnyUrl,
    "http": HttpUrl,
    "dsn": PostgresDsn,
    "size": ByteSize,
    "json": Json[list[int]],
    "enum": Color,
    "int_enum": Level,
    "literal": Literal["a", 1, None],
    "optional": int | None,
    "union": int | str,
    "list": list[int],
    "set_of_enum": set[Color],
    "tuple": tuple[int, str],
    "tuple_of_any_length": tuple[int, ...],
    "dict": dict[str, int],
    "dict_by_enum": dict[Color, int],
    "dict_by_uuid": dict[uuid.UUID, int],
    "limits": Annotated[int, Field(ge=1, lt=10)],
    "multiple": Annotated[float, Field(multiple_of=0.5)],
    "text": Annotated[str, Field(min_length=2, max_length=5, pattern="^a")],
    "discriminated": Annotated[Cat | Dog, Field(discriminator="kind")],
    "recursive": Node,
}


@pytest.mark.parametrize("name", PYDANTIC)
def test_answers_are_read_by_pydantic(compiler: GrammarCompiler, name: str) -> None:
    adapter = TypeAdapter(PYDANTIC[name])
    for value in check_answers(compiler, adapter.json_schema()):
        if name not in ("timedelta", "network", "size", "json", "url", "http", "dsn", "decimal", "bytes"):  # stricter
            adapter.validate_python(value) if name in ("base64",) else adapter.validate_json(json.dumps(value))


def test_a_pattern_of_pydantic_and_a_large_set_compile(compiler: GrammarCompiler) -> None:
    check_answers(compiler, TypeAdapter(re.Pattern).json_schema(), jsonschema.Draft7Validator, count=1)
    for kind in (set[int], frozenset[str]):
        grammar = Grammar.json_schema(TypeAdapter(kind).json_schema())
        assert [str(one) for one in grammar.unenforced] == ["#/uniqueItems"]
        compiler.compile(grammar)


# --- zod --------------------------------------------------------------------------------------------------------------

UUID = "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[1-8][0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}"
ZOD: dict[str, dict[str, Any]] = {
    "record": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}},
    "record_by_enum": {
        "type": "object",
        "propertyNames": {"type": "string", "enum": ["a", "b"]},
        "required": ["a", "b"],
        "additionalProperties": {"type": "number"},
    },
    "partial_record": {
        "type": "object",
        "propertyNames": {"enum": ["a", "b"]},
        "additionalProperties": {"type": "string"},
    },
    "record_by_pattern": {
        "type": "object",
        "propertyNames": {"type": "string", "pattern": "^a"},
        "additionalProperties": {},
    },
    "record_by_length": {"type": "object", "propertyNames": {"minLength": 2, "maxLength": 3}},
    "email": {
        "type": "string",
        "format": "email",
        "pattern": r"^(?:[\w'+\-]+\.)*[\w'+\-]*[A-Za-z0-9_+-]@(?:[A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
    },
    "uuid": {"type": "string", "format": "uuid", "pattern": f"^({UUID}|00000000-0000-0000-0000-000000000000)$"},
    "datetime": {
        "type": "string",
        "format": "date-time",
        "pattern": r"^\d{4}-\d\d-\d\dT\d\d:[0-5]\d:[0-5]\d(?:\.\d+)?(?:Z)$",
    },
    "mac": {"type": "string", "pattern": "^(?:[0-9A-F]{2}:){5}[0-9A-F]{2}$|^(?:[0-9a-f]{2}:){5}[0-9a-f]{2}$"},
    "base64": {
        "type": "string",
        "format": "base64",
        "contentEncoding": "base64",
        "pattern": "^$|^(?:[0-9a-zA-Z+/]{4})*(?:(?:[0-9a-zA-Z+/]{2}==)|(?:[0-9a-zA-Z+/]{3}=))?$",
    },
    "jwt": {"type": "string", "pattern": r"^[A-Za-z0-9-_]+\.[A-Za-z0-9-_]+\.[A-Za-z0-9-_]*$"},
    "unknown_format": {"type": "string", "format": "lowercase", "pattern": "^[^A-Z]*$"},
    "safe_integer": {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991},
    "tuple": {"type": "array", "prefixItems": [{"type": "string"}, {"type": "number"}], "items": False, "minItems": 2},
    "tuple_of_draft_7": D7
    | {"type": "array", "items": [{"type": "string"}], "additionalItems": {"type": "null"}, "minItems": 1},
    "discriminated": {
        "oneOf": [
            {"type": "object", "properties": {"k": {"const": "a"}, "x": {"type": "number"}}, "required": ["k", "x"]},
            {"type": "object", "properties": {"k": {"const": "b"}}, "required": ["k"], "additionalProperties": False},
        ]
    },
    "never": {"type": "object", "properties": {"a": {"not": {}}, "b": {}}, "additionalProperties": False},
    "intersection": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
            {"type": "object", "properties": {"b": {"type": "number"}}, "required": ["b"]},
        ]
    },
    "json": {
        "anyOf": [
            {"type": ["string", "number", "boolean", "null"]},
            {"type": "array", "items": {"$ref": "#"}},
            {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"$ref": "#"}},
        ]
    },
    "ip_of_zod_3": D7 | {"type": "string", "anyOf": [{"format": "ipv4"}, {"format": "ipv6"}]},
    "set_of_enum": D7 | {"type": "array", "uniqueItems": True, "items": {"type": "string", "enum": ["a", "b", "c"]}},
    "native_enum": D7 | {"type": ["string", "number"], "enum": [1, "b"]},
}


@pytest.mark.parametrize("name", ZOD)
def test_zod(compiler: GrammarCompiler, name: str) -> None:
    check_answers(compiler, ZOD[name])


# --- OpenAPI, and the rest of JSON Schema -----------------------------------------------------------------------------

PET = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "mother": {"allOf": [{"$ref": "#/definitions/Pet"}], "nullable": True}},
    "required": ["name", "mother"],
}
OPENAPI: dict[str, dict[str, Any]] = {
    "nullable": {
        "type": "object",
        "properties": {"a": {"type": "string", "nullable": True, "example": "x"}},
        "required": ["a"],
    },
    "nullable_enum": {"type": "string", "nullable": True, "enum": ["a", None]},
    "nullable_enum_without_null": {"type": "string", "nullable": True, "enum": ["a"]},
    "nullable_reference": {"$ref": "#/definitions/Pet", "definitions": {"Pet": PET}},
    "int32": {"type": "integer", "format": "int32"},
    "int64": {"type": "integer", "format": "int64", "minimum": -(2**63), "maximum": 2**63 - 1},
    "double": {"type": "number", "format": "double"},
    "exclusive_flags": {
        "type": "number",
        "minimum": 0,
        "exclusiveMinimum": True,
        "maximum": 1,
        "exclusiveMaximum": True,
    },
    "exclusive_flags_off": {"type": "integer", "minimum": 0, "exclusiveMinimum": False, "maximum": 3},
    "byte": {"type": "string", "format": "byte"},
}


@pytest.mark.parametrize("name", OPENAPI)
def test_openapi_3_0(compiler: GrammarCompiler, name: str) -> None:
    values = check_answers(compiler, OPENAPI[name], OPENAPI_3_0, 2 * NUM_ANSWERS)
    if name in ("nullable_enum", "nullable_enum_without_null"):
        assert (None in values) is (name == "nullable_enum")
    if name == "int32":
        assert all(-(2**31) <= value < 2**31 for value in values)


A_B = {"type": "object", "properties": {"a": {}, "b": {"type": "null"}, "c": {"type": "null"}}}
STANDARD: dict[str, dict[str, Any]] = {
    "one_of_required": A_B | {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    "one_of_types": {
        "oneOf": [{"type": "string"}, {"type": "integer"}, {"$ref": "#/$defs/n"}],
        "$defs": {"n": {"type": "null"}},
    },
    "one_of_open": {
        "oneOf": [
            {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]},
            {"type": "object", "properties": {"b": {}, "a": {}}, "required": ["b"]},
        ]
    },
    "any_of_required": A_B | {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    "dependent_required": A_B | {"dependentRequired": {"a": ["b"], "b": ["c"]}},
    "dependencies": D7 | A_B | {"dependencies": {"a": ["b"], "c": {"required": ["a"]}}},
    "dependent_schemas": A_B | {"dependentSchemas": {"a": {"properties": {"b": False}}}},
    "condition": {
        "type": "object",
        "properties": {"k": {"enum": ["a", "b", "c"]}, "x": {"type": "null"}},
        "if": {"properties": {"k": {"const": "a"}}, "required": ["k"]},
        "then": {"required": ["x"]},
        "else": {"properties": {"x": False}},
    },
    "condition_of_a_required_one": {
        "type": "object",
        "properties": {"k": {"enum": [1, 2]}, "x": {}},
        "required": ["k"],
        "if": {"properties": {"k": {"enum": [1.0]}}},
        "else": {"required": ["x"]},
    },
    "not_null": {"not": {"type": "null"}},
    "not_a_number": {"type": ["integer", "string"], "not": {"type": ["number"]}},
    "not_one_of": {"enum": [1, 2, True, "a"], "not": {"enum": [1.0, "a"]}},
    "not_required": A_B | {"not": {"required": ["a"]}, "minProperties": 1},
    "unevaluated": A_B | {"unevaluatedProperties": False},
    "unevaluated_items": {"type": "array", "prefixItems": [{"type": "null"}], "unevaluatedItems": {"type": "boolean"}},
    "unique_booleans": {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "minItems": 1},
    "anchor": {"type": "array", "items": {"$ref": "#n"}, "$defs": {"x": {"$anchor": "n", "type": "null"}}},
    "identifier": {
        "$id": "https://example.org/root.json",
        "type": "array",
        "items": {"$ref": "leaf.json#/$defs/b"},
        "$defs": {
            "leaf": {"$id": "leaf.json", "$defs": {"b": {"$ref": "#/$defs/c"}, "c": {"type": "boolean"}}},
            "c": {"type": "null"},
        },
    },
    "escaped_pointer": {"$ref": "#/$defs/a~1b~0%25", "$defs": {"a/b~%": {"type": "null"}}},
    "reference_with_siblings": {
        "$ref": "#/$defs/a",
        "maxLength": 3,
        "$defs": {"a": {"type": "string", "minLength": 2}},
    },
    "reference_to_a_property": {
        "type": "object",
        "properties": {"a": {"type": "null"}, "b": {"$ref": "#/properties/a"}},
    },
    "unused_definitions": {"type": "null", "$defs": {"a": {"$ref": "#/nowhere"}, "b": {"type": "text"}}},
    "minimum_of_properties": A_B | {"minProperties": 1},
    "all_properties": A_B | {"minProperties": 3, "additionalProperties": False},
    "joined": {
        "allOf": [{"$ref": "#/$defs/a"}, {"properties": {"b": {"type": "null"}}}],
        "type": "object",
        "$defs": {"a": {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}},
    },
    "whole_limits": {"type": "integer", "exclusiveMinimum": 2**60 + 1, "maximum": 2**62 + 3.0},
    "many_digits": {"type": "number", "minimum": 0.1234567890123456789, "maximum": 0.12345678901239},
    "tiny": {"type": "number", "exclusiveMinimum": 0, "maximum": 1e-12},
}


@pytest.mark.parametrize("name", STANDARD)
def test_json_schema(compiler: GrammarCompiler, name: str) -> None:
    check_answers(compiler, STANDARD[name], count=2 * NUM_ANSWERS)


@pytest.mark.parametrize(
    "name", ["date-time", "time", "date", "uri", "email", "duration", "ipv4", "ipv6", "hostname", "uuid"]
)
def test_a_format_comes_to_an_end(compiler: GrammarCompiler, name: str) -> None:
    """Whatever may go on does, until nothing can."""
    compiled = compiler.compile(Grammar.json_schema({"type": "string", "format": name}))
    constraint, quote = compiled.begin([compiler.vocab_size - 1]), compiler._tokens.index(b'"')
    text = ""
    while not constraint.is_finished:
        mask = constraint.mask()
        allowed = [i for i in range(compiler.vocab_size) if mask[i // 32] >> i % 32 & 1]
        token_id = next((i for i in allowed if i != quote), quote)
        constraint.accept(token_id)
        text += compiler._tokens[token_id].decode() if token_id < compiler.vocab_size - 1 else ""
        assert len(text) <= 2050
    json.loads(text)


def test_a_tuple_of_an_older_draft_keeps_what_is_said_of_other_items(compiler: GrammarCompiler) -> None:
    """In either order of its keywords."""
    schema = {"type": "array", "additionalItems": False, "items": [{"type": "null"}], "minItems": 1}
    assert check_answers(compiler, D7 | schema) == [[None]] * NUM_ANSWERS


KIND = {"properties": {"kind": {"enum": ["a", "b"]}, "x": {}, "y": {}}, "type": "object"}


@pytest.mark.parametrize(
    ("schema", "keyword", "wrong"),
    [
        (
            KIND
            | {"if": {"properties": {"kind": {"const": "a"}}, "required": ["kind", "x"]}, "else": {"required": ["y"]}},
            "if",
            '{"kind":"a"}',
        ),
        (
            KIND | {"if": {"properties": {"kind": {"const": "a"}}, "type": "array"}, "else": {"required": ["y"]}},
            "if",
            '{"kind":"a"}',
        ),
        (
            KIND | {"if": {"properties": {"kind": {"const": "a", "minLength": 2}}}, "else": {"required": ["y"]}},
            "if",
            '{"kind":"a"}',
        ),
        (
            {"type": "object", "propertyNames": {"enum": ["a", "bbb"], "maxLength": 1}},
            "propertyNames",
            '{"bbb":1}',
        ),
        ({"type": "array", "items": [{"type": "string"}], "unevaluatedItems": False}, "", '["a",1]'),
        ({"not": {"required": ["a"]}}, "", "1"),
        ({"type": ["integer", "null"], "format": "uint8"}, "", "999"),
        (
            {
                "type": "object",
                "properties": {"a": {}, "b": {}, "c": {}},
                "dependencies": {"a": ["b"]},
                "dependentRequired": {"a": ["c"]},
            },
            "",
            '{"a":1,"b":1}',
        ),
    ],
)
def test_a_keyword_beside_others_is_held_or_named(
    compiler: GrammarCompiler, schema: dict[str, Any], keyword: str, wrong: str
) -> None:
    """The wrong value is none of the schema; the grammar accepts it only if it names the keyword."""
    if "format" not in schema and "dependencies" not in schema:
        dialect = jsonschema.Draft201909Validator if "unevaluatedItems" in schema else jsonschema.Draft202012Validator
        assert not dialect(schema).is_valid(json.loads(wrong))
    grammar = Grammar.json_schema(schema)
    assert [one.keyword for one in grammar.unenforced] == [keyword] * bool(keyword)
    compiled = compiler.compile(grammar)
    wanted = [compiler._tokens.index(c.encode()) for c in wrong]
    assert compiled.accepts(wanted) is bool(keyword)
