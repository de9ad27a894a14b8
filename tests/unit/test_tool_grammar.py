"""Grammars of calls, held by llguidance: they take what is written and read, and nothing that a schema forbids."""

import json
import random
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from grammar_walk import character_compiler
from llamarium.errors import ToolError
from llamarium.sampling.grammar.calls import compile_answer, grammar_of_answer
from llamarium.tokenizer.tools.definition import ToolCall, ToolDefinition
from llamarium.tokenizer.tools.forms import ToolForm, write_calls
from llamarium.tokenizer.tools.parser import ToolCallParser
from llamarium.tokenizer.tools.request import ToolRequest

pytestmark = pytest.mark.quick

FORMS: tuple[ToolForm, ...] = ("llama3_json", "pythonic", "hermes")
COMPILER = character_compiler()
BYTES = LLTokenizer("byte")  # a token for each byte
SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "days": {"type": "integer"},
            "city": {"type": "string", "description": "a city"},
            "metric": {"enum": ["celsius", "fahrenheit", None]},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
    "plot": {
        "type": "object",
        "properties": {
            "points": {
                "type": "array",
                "items": {"type": "object", "properties": {"x": {"type": "number"}, "y": {}}, "required": ["x"]},
            },
            "grid": {"anyOf": [{"type": "boolean"}, {"type": ["integer", "null"]}]},
            "style": {"const": "dotted"},
        },
        "additionalProperties": False,
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
GOOD = [
    ("get_weather", {"city": 'Köln\'s "old" town\n'}),
    ("get_weather", {"days": 3, "city": "", "metric": "celsius"}),
    ("get_weather", {"city": "x", "metric": None}),
    ("plot", {}),
    ("plot", {"points": [{"x": 1.5}, {"x": -2, "y": {"a": [1, "b", None, True]}}], "grid": None, "style": "dotted"}),
    ("plot", {"grid": True}),
    ("plot", {"grid": 3}),
    ("now", {}),
]
BAD = [
    ("get_weather", {"days": 3}),
    ("get_weather", {"city": 3}),
    ("get_weather", {"city": "x", "metric": "kelvin"}),
    ("get_weather", {"city": "x", "other": 1}),
    ("plot", {"points": [{"y": 1}]}),
    ("plot", {"grid": 1.5}),
    ("plot", {"style": "dashed"}),
    ("now", {"a": 1}),
    ("unknown", {}),
]


def tools(**schemas: Any) -> list[ToolDefinition]:
    return [ToolDefinition(name, parameters=schema) for name, schema in (schemas or SCHEMAS).items()]


def text(form: ToolForm, *calls: tuple[str, dict[str, Any]]) -> str:
    return write_calls([ToolCall("", name, json.dumps(values)) for name, values in calls], form)


def matcher(request: ToolRequest, form: ToolForm) -> LLMatcher:
    grammar = request.grammar(form)
    assert grammar is not None
    found = LLMatcher(BYTES, LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not found.is_error(), found.get_error()
    return found


def accepts(request: ToolRequest, form: ToolForm, answer: str) -> bool:
    found = matcher(request, form)
    wanted = [*answer.encode()]
    return found.try_consume_tokens(wanted) == len(wanted) and found.is_accepting()


@pytest.mark.parametrize("form", FORMS)
def test_a_call_is_held_to_its_schema(form: ToolForm) -> None:
    request = ToolRequest.read(tools(), "required")
    for call in GOOD:
        jsonschema.validate(call[1], SCHEMAS[call[0]])
        assert accepts(request, form, text(form, call)), call
    for call in BAD:
        assert not accepts(request, form, text(form, call)), call
    assert not accepts(request, form, "")
    assert not accepts(request, form, "Hello")


@pytest.mark.parametrize("form", FORMS)
def test_several_calls_only_where_they_are_wanted(form: ToolForm) -> None:
    calls = text(form, *GOOD)
    assert accepts(ToolRequest.read(tools(), "required"), form, calls)
    assert not accepts(ToolRequest.read(tools(), "required", False), form, calls)
    assert accepts(ToolRequest.read(tools(), "required", False), form, text(form, GOOD[0]))


@pytest.mark.parametrize("form", FORMS)
def test_a_named_tool_is_the_only_one(form: ToolForm) -> None:
    request = ToolRequest.read(tools(), {"type": "function", "function": {"name": "now"}})
    assert accepts(request, form, text(form, ("now", {})))
    assert not accepts(request, form, text(form, ("plot", {})))
    assert not accepts(request, form, text(form, ("now", {}), ("now", {}))), "it is called once"
    required, numbers = ToolRequest.read(tools(), "required"), [("get_weather", {"city": str(i)}) for i in range(9)]
    assert accepts(required, form, text(form, *numbers[:8])) and not accepts(required, form, text(form, *numbers))


@pytest.mark.parametrize("form", FORMS)
def test_strict_tools_leave_the_choice_and_hold_the_call(form: ToolForm) -> None:
    strict = [ToolDefinition(name, parameters=schema, strict=True) for name, schema in SCHEMAS.items()]
    request = ToolRequest.read(strict)
    for call in GOOD:
        assert accepts(request, form, text(form, call))
    for call in BAD:
        assert not accepts(request, form, text(form, call))
    for words in ("", "Hello\n{ <tool_ [f(a=1)]", " \n 3 < 4"):
        assert accepts(request, form, words)
    assert not accepts(request, form, "<tool_call>")
    assert not accepts(request, form, "so <|python_tag|>x")
    assert accepts(request, "hermes", f"Let me see.\n{text('hermes', *GOOD)}")
    assert not accepts(request, "hermes", f"Let me see.\n{text('hermes', BAD[0])}")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("choice", ["required", "strict"])
def test_what_a_grammar_allows_is_read_as_what_the_schema_allows(form: ToolForm, choice: str) -> None:
    """Answers of random bytes, as far as the grammar allows them."""
    is_strict = choice == "strict"
    offered = [ToolDefinition(name, parameters=schema, strict=is_strict) for name, schema in SCHEMAS.items()]
    request = ToolRequest.read(offered, None if is_strict else choice)
    chance, num_calls = random.Random(0), 0
    for _ in range(40):
        answer = at_random(matcher(request, form), chance)
        if answer is None:
            continue
        parser = ToolCallParser(request.tools)
        parser.push(answer)
        parser.finish()
        num_calls += len(parser.calls)
        assert all(call.is_complete for call in parser.calls)
        assert is_strict or (parser.calls and not parser.content)
        for call in parser.calls:
            jsonschema.validate(call.values(), SCHEMAS[call.name])
    assert num_calls > 15 or is_strict


def at_random(found: LLMatcher, chance: random.Random) -> str | None:
    """Return an answer that the grammar allows, or None if chance leads nowhere."""
    answer = bytearray()
    for _ in range(400):
        mask = found.compute_bitmask()
        allowed = [i for i in range(256) if mask[i // 8] >> i % 8 & 1]
        ends = [i for i in allowed if chr(i) in "\"')}]>"]
        if found.is_accepting() and (not allowed or chance.random() < 0.5):
            return answer.decode("utf-8", "strict")
        plain = [i for i in allowed if i < 128]
        byte = chance.choice(ends if ends and chance.random() < 0.4 else plain)
        assert found.consume_token(byte)
        answer.append(byte)
    return None


EITHER = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
}


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "x"}}}, "#/properties/a/pattern"),
        ({"properties": {"a": {"type": "array", "items": {"minimum": 3}}}}, "#/properties/a/items/minimum"),
        ({"properties": {"a": {"enum": [1], "multipleOf": 2}}}, "#/properties/a/multipleOf"),
        ({"patternProperties": {"^a": {}}}, "#/patternProperties"),
        ({"required": ["a"], "additionalProperties": False}, "#"),
        ({"properties": {"a": EITHER}}, "#/properties/a/anyOf"),
        (EITHER, "#/anyOf"),
        ({"properties": {"a": {"enum": [1, 2], "anyOf": [{"const": 1}, {"const": 3}]}}}, "#/properties/a/anyOf"),
        (
            {"$defs": {"n": {"type": "object"}}, "properties": {"a": {"$ref": "#/$defs/n", "required": ["b"]}}},
            "#/properties/a/required",
        ),
    ],
)
def test_python_names_what_it_does_not_hold_and_refuses_it_if_the_tool_is_strict(schema, named: str) -> None:
    request = ToolRequest.read(tools(now=SCHEMAS["now"], f=schema), "required")
    held = compile_answer(COMPILER, request, "pythonic")
    assert held is not None and [str(one) for one in held[0].unenforced] == [f"tools[1].function.parameters{named}"]
    strict = tuple(replace(tool, strict=True) for tool in request.tools)
    with pytest.raises(ToolError) as caught:
        compile_answer(COMPILER, replace(request, tools=strict), "pythonic")
    assert caught.value.param == "tools[1].function.parameters"


NODE = {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/n"}}, "required": ["v"]}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"items": {"type": "integer"}, "minItems": 1, "maxItems": 2}, ["[1]", "[1, 2]"], ["[]", "[1, 2, 3]", "['a']"]),
        (
            {"prefixItems": [{"type": "string"}], "items": {"type": "null"}},
            ["['a']", "['a', None]"],
            ["[]", "['a', 1]"],
        ),
        ({"prefixItems": [{}, {}], "items": False, "type": "array"}, ["[1, 'a']"], ["[1, 2, 3]"]),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, ["{}", "{'a': 1}"], ["{'a': 'b'}"]),
        ({"$ref": "#/$defs/n"}, ["{'v': 1}", "{'v': 1, 'next': {'v': 2}}"], ["{'next': {'v': 2}}", "{'v': 'a'}"]),
        ({"anyOf": [{"minimum": 1}, {"type": "string"}], "type": ["integer", "null"]}, ["1", "None"], ["'a'", "1.5"]),
        ({"enum": [1, "a", True], "type": "integer"}, ["1"], ["'a'", "True"]),
    ],
)
def test_python_holds_lists_mappings_references_and_alternatives(schema, good: list[str], bad: list[str]) -> None:
    described = {"properties": {"a": schema}, "required": ["a"], "$defs": {"n": NODE}}
    request = ToolRequest.read(tools(f=described), "required")
    for text in good:
        assert accepts(request, "pythonic", f"[f(a={text})]"), text
    for text in bad:
        assert not accepts(request, "pythonic", f"[f(a={text})]"), text


def test_numbers_in_python_stay_within_floating_point() -> None:
    request = ToolRequest.read(tools(f={"properties": {"x": {"type": "number"}}, "required": ["x"]}), "required")
    for number, is_one in (("-1.5e99", True), ("9" * 40, True), ("1e100", False), ("9" * 41, False)):
        assert accepts(request, "pythonic", f"[f(x={number})]") is is_one


def test_members_that_may_be_left_out_are_bounded_in_python() -> None:
    def schema(count: int) -> dict[str, Any]:
        return {"properties": {f"p{i}": {"type": "integer"} for i in range(count)}, "required": ["p0"]}

    assert ToolRequest.read(tools(f=schema(401)), "required").grammar("pythonic")
    with pytest.raises(ToolError, match="more than 400 members") as caught:
        ToolRequest.read(tools(f=schema(402)), "required").grammar("pythonic")
    assert caught.value.param == "tools[0].function.parameters.properties"


@pytest.mark.parametrize("form", FORMS)
def test_rules_and_characters_are_bounded(form: ToolForm) -> None:
    def request(num_tools: int, num_arguments: int, width: int) -> ToolRequest:
        schema = {"properties": {f"{'p' * width}{i}": {"type": "integer"} for i in range(num_arguments)}}
        return ToolRequest(tuple(tools(**{f"f{i}": schema for i in range(num_tools)})), "required")

    assert grammar_of_answer(request(40, 9, 1), form) is not None
    too_many, too_long = request(60, 30, 1), request(2, 200, 900)
    for large in (too_long, too_many) if form == "pythonic" else (too_long,):
        with pytest.raises(ToolError, match="too much for a grammar") as caught:
            grammar_of_answer(large, form)
        assert caught.value.param == "tools"


@pytest.mark.parametrize("form", ["llama3_json", "hermes"])
@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"properties": {"a": {"maxLenght": 3}}}, "#/properties/a/maxLenght"),
        ({"properties": {"a": {"type": "int"}}}, "#/properties/a/type"),
        ({"properties": {"a": {"contains": {"type": "null"}}}}, "#/properties/a/contains"),
        ({"properties": {"a": {"$ref": "#/$defs/gone"}}}, "#/properties/a/$ref"),
        ({"type": "array"}, "#"),
        ({"not": {}}, "#"),
        ({"properties": {"a": {"$ref": "#/properties/a"}}}, "#"),
        ({"properties": {"a": {"allOf": [{"type": "string"}, {"type": "null"}]}}, "required": ["a"]}, "#"),
    ],
)
def test_a_tool_with_a_schema_that_is_not_held_is_named_and_refused_if_it_is_strict(form, schema, named: str) -> None:
    request = ToolRequest.read(tools(now=SCHEMAS["now"], f=schema), "required")
    held = compile_answer(COMPILER, request, form)
    assert held is not None and [str(one) for one in held[0].unenforced] == [f"tools[1].function.parameters{named}"]
    strict = tools(now=SCHEMAS["now"], f=schema)
    strict[1] = replace(strict[1], strict=True)
    with pytest.raises(ToolError) as caught:
        compile_answer(COMPILER, ToolRequest(tuple(strict), "required"), form)
    assert caught.value.param == "tools[1].function.parameters"
    assert grammar_of_answer(ToolRequest.read(tools(f=schema)), form) is None


def test_a_format_is_held_in_json() -> None:
    schema = {"properties": {"day": {"type": "string", "format": "date"}}, "required": ["day"]}
    grammar = grammar_of_answer(ToolRequest.read(tools(f=schema), "required"), "llama3_json")
    assert grammar is not None
    for day, is_one in (("2024-02-29", True), ("2024-13-01", False), ("today", False)):
        found = LLMatcher(BYTES, LLMatcher.grammar_from_lark(grammar.text), log_level=0)
        wanted = [*text("llama3_json", ("f", {"day": day})).encode()]
        assert (found.try_consume_tokens(wanted) == len(wanted)) is is_one


def test_json_is_not_spaced_without_end() -> None:
    request = ToolRequest.read(tools(), "required")
    assert accepts(request, "llama3_json", '{"name": "plot", "parameters": {"grid": true, "style": "dotted"}}')
    assert not accepts(request, "llama3_json", '{"name": "plot", "parameters": {"grid":   true}}')


def test_a_schema_cannot_loosen_the_grammar() -> None:
    loose = {"x-guidance": {"lenient": True}, "properties": {"a": {"type": "null"}}, "required": ["a"]}
    request = ToolRequest.read(tools(f=loose), "required")
    assert not accepts(request, "llama3_json", '{"name": "f", "parameters": {"a": 1}}')
    assert accepts(request, "llama3_json", '{"name": "f", "parameters": {"a": null}}')


def test_python_joins_what_the_root_refers_to_with_its_own_properties() -> None:
    schema = {
        "$ref": "#/$defs/n",
        "$defs": {"n": {"properties": {"v": {"type": "integer"}}, "required": ["v"]}},
        "properties": {"w": {"type": "string"}},
        "required": ["w"],
    }
    held = compile_answer(COMPILER, ToolRequest.read(tools(f=schema), "required"), "pythonic")
    assert held is not None and held[0].unenforced == ()
    for answer, is_one in (("v=1, w='a'", True), ("w='a'", False), ("v=1", False), ("v='a', w='a'", False)):
        wanted = [COMPILER._tokens.index(c.encode()) for c in f"[f({answer})]"]
        assert held[1].accepts(wanted) is is_one, answer


def test_python_holds_the_properties_beside_alternatives() -> None:
    request = ToolRequest.read(tools(f={"properties": {"a": EITHER}, "required": ["a"]}), "required")
    assert accepts(request, "pythonic", "[f(a={'a': 1})]")
    assert not accepts(request, "pythonic", "[f(a={'a': 'x'})]")
