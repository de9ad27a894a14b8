"""Schemas made to be costly: each compiles or is refused within two seconds, and others are not disturbed."""

import json
import time
import tracemalloc
from typing import Any

import pytest

from grammar_walk import character_compiler
from llamarium.errors import GrammarError, GrammarLimitError, ToolError
from llamarium.sampling.grammar.calls import compile_answer
from llamarium.sampling.grammar.compiler import GrammarCompiler
from llamarium.sampling.grammar.description import MAX_BYTES, Grammar
from llamarium.sampling.grammar.schema.reading import MAX_LOWERED
from llamarium.tokenizer.tools.definition import read_tools
from llamarium.tokenizer.tools.request import ToolRequest

pytestmark = pytest.mark.quick

LIMIT_S = 2.0


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return character_compiler()


def chain(keyword: str, length: int) -> dict[str, Any]:
    """Return definitions of which each refers to the next one twice."""
    defs: dict[str, Any] = {f"a{i}": {keyword: [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": {**defs, f"a{length}": {"properties": {"x": {}}}}}


def doubled(length: int) -> dict[str, Any]:
    """Return definitions that are merged with themselves, each over two references to the next."""
    both = {name: {} for name in "lr"}
    defs: dict[str, Any] = {}
    for i in range(length):
        own = {"properties": {name: {"$ref": f"#/$defs/a{i + 1}"} for name in both}}
        defs[f"a{i}"] = own | {"allOf": [own]}
    return {"$ref": "#/$defs/a0", "$defs": {**defs, f"a{length}": {}}}


def product(width: int, count: int, keyword: str = "anyOf") -> dict[str, Any]:
    parts = [{keyword: [{"properties": {f"a{i}_{j}": {}}} for j in range(width)]} for i in range(count)]
    return {"allOf": parts}


COSTLY: dict[str, Any] = {
    "many values": {"enum": [f"value-{i}" for i in range(10_000)]},
    "many numbers": {"enum": [i * 7 for i in range(10_000)]},
    "unique values": {"type": "array", "uniqueItems": True, "items": {"enum": list(range(5000))}},
    "references in allOf": chain("allOf", 60),
    "references in anyOf": chain("anyOf", 60),
    "references in oneOf": chain("oneOf", 60),
    "merged references": doubled(40),
    "a product of alternatives": product(10, 8),
    "exclusive alternatives": product(60, 20, "oneOf"),
    "many branches": {"oneOf": [{"required": [f"a{i}"]} for i in range(2000)]},
    "pattern of patterns": {"type": "string", "pattern": "^((a{1,100}){1,100}){1,100}$"},
    "ambiguous pattern": {"type": "string", "pattern": "^(a|aa)+(b|bb)*.{50}x.{60}y$"},
    "pattern from the end": {"type": "string", "pattern": "a.{200}$"},
    "nested stars": {"type": "string", "pattern": "^(((a*)*)*)*b$"},
    "patterns at once": {"allOf": [{"pattern": f"{c}.{{30}}$"} for c in "abcdef"], "type": "string"},
    "long text": {"type": "string", "minLength": 10**6, "maxLength": 10**7},
    "long pattern": {"type": "string", "pattern": "(a|b)" * 10_000},
    "many items": {"type": "array", "minItems": 10**6, "items": {"type": "string"}},
    "many properties": {"type": "object", "minProperties": 10**6, "additionalProperties": {"type": "null"}},
    "many optional properties": {"properties": {f"k{i}": {"type": "string"} for i in range(400)}},
    "many required properties": {
        "properties": {f"k{i}": {} for i in range(4000)},
        "required": [f"k{i}" for i in range(4000)],
    },
    "many conditions": {
        "properties": {f"k{i}": {"enum": [1, 2]} for i in range(9)},
        "type": "object",
        "allOf": [{"if": {"properties": {f"k{i}": {"const": 1}}}, "then": {"required": ["k0"]}} for i in range(9)],
    },
    "many dependencies": {
        "type": "object",
        "properties": {f"k{i}": {} for i in range(99)},
        "allOf": [{"dependentRequired": {f"k{i}": [f"k{i + 1}"]}} for i in range(30)],
    },
    "many pattern properties": {"patternProperties": {f"^{'ab' * i}": {} for i in range(200)}},
    "a long circle": {
        "$ref": "#/$defs/a0",
        "$defs": {f"a{i}": {"$ref": f"#/$defs/a{(i + 1) % 3000}"} for i in range(3000)},
    },
    "a circle through anchors": {"$ref": "#a", "$defs": {"x": {"$anchor": "a", "allOf": [{"$ref": "#a"}]}}},
    "many anchors": {"$ref": "#a4999", "$defs": {f"a{i}": {"$anchor": f"a{i}", "$id": f"d{i}/"} for i in range(4999)}},
    "many digits": {"type": "number", "multipleOf": 10**-300, "minimum": -(10**300), "maximum": 10**300},
    "many keywords": {f"maxLength{i}": 1 for i in range(3000)},
}


@pytest.mark.parametrize("name", COSTLY)
def test_a_costly_schema_is_compiled_or_refused_in_time(compiler: GrammarCompiler, name: str) -> None:
    """The time of this thread, and of the compiling one: both run alone."""
    text = json.dumps(COSTLY[name])
    began = time.process_time()
    try:
        for tolerant in (False, True):
            compiler.compile(Grammar.json_schema(text, tolerant=tolerant))
    except GrammarError as error:
        assert len(str(error)) < 3000
    assert time.process_time() - began < 2 * LIMIT_S  # twice it was read and compiled
    compiler.compile(Grammar.json_object())  # a slot is free


def test_a_schema_of_a_megabyte_is_refused_before_it_is_read(compiler: GrammarCompiler) -> None:
    large = {"enum": ["x" * 1000] * 1000}
    began = time.process_time()
    tracemalloc.start()
    with pytest.raises(GrammarLimitError, match=f"{MAX_BYTES:,}"):
        Grammar.json_schema(json.dumps(large))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 * 2**20 and time.process_time() - began < LIMIT_S


def test_three_hundred_tools_are_refused_and_many_costly_ones_are_named(compiler: GrammarCompiler) -> None:
    def tool(i: int, schema: Any) -> dict[str, Any]:
        return {
            "type": "function",
            "function": {"name": f"f{i}", "parameters": {"type": "object", "properties": {"a": schema}}},
        }

    with pytest.raises(ToolError) as caught:
        read_tools([tool(i, {}) for i in range(300)])
    assert caught.value.param == "tools"
    costly = ["references in allOf", "merged references", "a product of alternatives", "a circle through anchors"]
    listed = [tool(i, COSTLY[name]) for i, name in enumerate(costly)] + [tool(9, {"type": "null"})]
    began = time.process_time()
    request = ToolRequest.read(listed, "required")
    held = compile_answer(compiler, request, "hermes")
    assert held is not None and held[0].unenforced
    assert time.process_time() - began < 2 * LIMIT_S
    assert held[1].accepts([compiler._tokens.index(c.encode()) for c in CALL])


CALL = '<tool_call>\n{"name": "f9", "arguments": {"a": null}}\n</tool_call>'


HOSTILE = {
    "an index of thousands of digits": '{"allOf": [{}], "properties": {"a": {"$ref": "#/allOf/' + "0" * 5000 + '"}}}',
    "a reference to a faulty address": '{"properties": {"a": {"$ref": "http://[x#a"}}}',
    "an identifier with a faulty address": '{"$id": "http://[x#a"}',
    "an infinite length": '{"minLength": 1e999}',
    "an infinite constant": '{"oneOf": [{"const": 1e999}, {"type": "string"}]}',
    "a limit of hundreds of digits": '{"maximum": 1' + "0" * 400 + "}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_numbers_and_references_out_of_range_are_named_or_refused(name: str) -> None:
    try:
        grammar = Grammar.json_schema(HOSTILE[name])
    except GrammarError as error:
        assert "e999" in HOSTILE[name] or "maximum" in HOSTILE[name], error
    else:
        assert [one.keyword for one in grammar.unenforced] == (["$ref"] if '"$ref"' in HOSTILE[name] else [])


def test_a_proof_counts_the_names_that_it_compares() -> None:
    """The pair of references is repeated, and each branch requires thousands of names."""
    defs = {key: {"type": "object", "required": [f"{key}{i}" for i in range(8000)]} for key in "ab"}
    pair = {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}
    schema = {"$defs": defs, "properties": {f"p{i}": pair for i in range(400)}}
    began = time.process_time()
    Grammar.json_schema(schema)
    assert time.process_time() - began < LIMIT_S


def nested_conditions(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"required": ["x"]}
    for _ in range(depth):
        condition = {"properties": {"k": {"const": 1}}, "required": ["k"]}
        schema = {"type": "object", "properties": {"k": {"enum": [1, 2]}}, "if": condition, "else": schema}
    return schema


def beside_references(width: int) -> dict[str, Any]:
    """Objects that are closed with what the same chain of references lists."""
    defs = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}", "properties": {f"p{i}" * 9: {}}} for i in range(width)}
    objects = {f"o{i}": {"$ref": "#/$defs/a0", "properties": {"x": {}}} for i in range(width)}
    return {"$defs": {**defs, f"a{width}": {}}, "properties": objects, "required": [*objects]}


UNIQUE = {"type": "array", "uniqueItems": True}
NAMES = [f"name-{i}" for i in range(2000)]
GROWING: dict[str, dict[str, Any]] = {
    "unique items by a reference": {
        "$defs": {"e": {"enum": ["a", "b", "c", "d"]}},
        "properties": {f"p{i}": UNIQUE | {"items": {"$ref": "#/$defs/e"}} for i in range(100)},
    },
    "unique long items": {
        "properties": {f"p{i}": UNIQUE | {"items": {"enum": [c * 1000 for c in "abcd"]}} for i in range(20)}
    },
    "listed names of long values": {
        "type": "object",
        "required": NAMES,
        "propertyNames": {"enum": NAMES},
        "additionalProperties": {"enum": ["x" * 2000]},
    },
    "listed names by a reference": {
        "$defs": {"n": {"enum": [name * 20 for name in NAMES[:390]]}},
        "properties": {f"p{i}": {"type": "object", "propertyNames": {"$ref": "#/$defs/n"}} for i in range(300)},
    },
    "closing beside references": beside_references(390),
    "nested conditions": nested_conditions(40),
}


@pytest.mark.parametrize("name", GROWING)
def test_a_small_schema_stays_small(name: str) -> None:
    began = time.process_time()
    tracemalloc.start()
    try:
        grammar = Grammar.json_schema(GROWING[name])
    except GrammarLimitError:
        assert name == "listed names by a reference"
    else:
        assert len(grammar.text) <= MAX_LOWERED
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 32 * 2**20 and time.process_time() - began < 2 * LIMIT_S
