"""Tools, calls and choices between them: what is taken, and what is refused by its path."""

from typing import Any

import pytest

from llamarium.errors import ChatFormatError, ToolError
from llamarium.tokenizer.tools.definition import (
    MAX_TOOLS,
    ToolCall,
    ToolDefinition,
    new_call_id,
    read_calls,
    read_tools,
)
from llamarium.tokenizer.tools.request import ToolRequest

pytestmark = pytest.mark.quick

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tool(name: Any = "get_weather", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def test_a_tool_goes_in_and_out_as_openai_has_it() -> None:
    given = tool(description="Weather now", parameters=CITY)
    (found,) = read_tools([given])
    assert found == ToolDefinition("get_weather", "Weather now", CITY)
    assert found.to_openai() == given
    assert read_tools([found]) == (found,)
    assert read_tools(None) == read_tools([]) == ()


def test_a_tool_without_parameters_takes_none() -> None:
    (found,) = read_tools([tool("now", description=None, parameters=None, strict=None)])
    assert found.to_openai()["function"] == {
        "name": "now",
        "description": "",
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    }


A = "tools[0].function.parameters.properties.a"


def of(schema: object) -> dict[str, Any]:
    """A tool with one argument."""
    return tool("f", parameters={"properties": {"a": schema}})


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ("get_weather", "tools"),
        ({"type": "function"}, "tools"),
        ([3], "tools[0]"),
        ([{"type": "retrieval"}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([tool("f"), tool("f")], "tools[1].function.name"),
        ([tool("f"), tool("")], "tools[1].function.name"),
        ([tool("a" * 65)], "tools[0].function.name"),
        ([tool("<|eot_id|>")], "tools[0].function.name"),
        ([tool("f\n")], "tools[0].function.name"),
        ([tool(None)], "tools[0].function.name"),
        ([tool("f", surprise={1})], "tools[0].function.surprise"),
        ([{**tool("f"), "cache": float("nan")}], "tools[0].cache"),
        ([tool("f", description=3)], "tools[0].function.description"),
        ([tool("f", description="\ud800")], "tools[0].function.description"),
        ([tool("f", strict="yes")], "tools[0].function.strict"),
        ([tool("f", parameters=[])], "tools[0].function.parameters"),
        ([tool("f", parameters={"a": [1, {2}]})], "tools[0].function.parameters.a[1]"),
        ([tool("f", parameters={"a": float("nan")})], "tools[0].function.parameters.a"),
        ([tool("f", parameters={"a": 10**400})], "tools[0].function.parameters.a"),
        ([tool("f", parameters={1: 2})], "tools[0].function.parameters, a key of it,"),
        ([tool(f"f{i}") for i in range(MAX_TOOLS + 1)], "tools"),
        ([tool("f", description="x" * 2**18)], "tools"),
    ],
)
def test_what_is_no_tool_is_refused_by_its_path(tools: Any, param: str) -> None:
    with pytest.raises(ToolError) as caught:
        read_tools(tools)
    assert caught.value.param == param
    assert str(caught.value).startswith(param)
    assert isinstance(caught.value, ChatFormatError)


def test_a_schema_nested_without_end() -> None:
    schema: dict[str, Any] = {}
    schema["items"] = schema
    with pytest.raises(ToolError, match="deeper than 32"):
        ToolDefinition("f", parameters=schema)


def test_calls_of_a_dialog() -> None:
    as_text = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": "ä"}'}}
    as_object = {"function": {"name": "f", "arguments": {"a": "ä"}}}
    first, second, third = read_calls([as_text, as_object, {"function": {"name": "f"}}], "calls")
    assert first.to_openai() == as_text
    assert first.values() == second.values() == {"a": "ä"}
    assert third.values() == {}
    assert second.to_template() == {"type": "function", **as_object}
    assert new_call_id() != new_call_id()


@pytest.mark.parametrize(
    ("call", "param"),
    [
        ("f", "calls[0]"),
        ({"type": "tool", "function": {"name": "f"}}, "calls[0].type"),
        ({"function": {"name": "f()"}}, "calls[0].function.name"),
        ({"function": {"name": "f", "arguments": "{"}}, "calls[0].function.arguments"),
        ({"function": {"name": "f", "arguments": "[1]"}}, "calls[0].function.arguments"),
        ({"function": {"name": "f", "arguments": '{"a": NaN}'}}, "calls[0].function.arguments"),
        ({"function": {"name": "f", "arguments": '{"a": 1, "a": 2}'}}, "calls[0].function.arguments"),
        ({"function": {"name": "f", "arguments": '{"a":' * 9999}}, "calls[0].function.arguments"),
        ({"function": {"name": "f", "arguments": 3}}, "calls[0].function.arguments"),
        ({"id": 3, "function": {"name": "f"}}, "calls[0].id"),
    ],
)
def test_what_is_no_call_is_refused_by_its_path(call: Any, param: str) -> None:
    with pytest.raises(ToolError) as caught:
        read_calls([call], "calls")
    assert caught.value.param == param


def test_arguments_that_broke_off_are_no_values() -> None:
    with pytest.raises(ToolError, match="not valid JSON"):
        ToolCall("c", "f", '{"a": ', is_complete=False).values()


def test_choices() -> None:
    tools = [tool("f"), tool("g")]
    named = ToolRequest.read(tools, {"type": "function", "function": {"name": "g"}}, False)
    assert (named.choice, named.allowed, named.parallel) == ("required", ("g",), False)
    assert [one.name for one in named.offered] == ["g"]
    for mode in ("auto", "required"):
        chosen = ToolRequest.read(tools, allowed(mode, "g"))
        assert (chosen.choice, [one.name for one in chosen.offered], chosen.is_held) == (mode, ["g"], mode != "auto")
    assert ToolRequest.read() == ToolRequest.read([], "auto", True) == ToolRequest()
    assert (ToolRequest().offered, ToolRequest().parser(), ToolRequest().grammar(None)) == ((), None, None)
    none = ToolRequest.read(tools, "none")
    assert (none.offered, none.parser(), none.grammar("hermes")) == ((), None, None)
    auto = ToolRequest.read(tools)
    assert auto.grammar(None) is None
    assert auto.parser() is not None


def allowed(mode: str, *names: str) -> dict[str, Any]:
    named = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [tool("f")], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [tool("f")], "tool_choice": ["f"]}, "tool_choice"),
        ({"tools": [tool("f")], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"tools": [tool("f")], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": [tool("f")], "tool_choice": allowed("all", "f")}, "tool_choice.allowed_tools.mode"),
        ({"tools": [tool("f")], "tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools"),
        (
            {"tools": [tool("f")], "tool_choice": allowed("auto", "f", "g")},
            "tool_choice.allowed_tools.tools[1].function.name",
        ),
        (
            {"tools": [tool("f")], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice.function.name",
        ),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice.function.name"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ],
)
def test_what_is_no_choice_is_refused_by_its_path(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ToolError) as caught:
        ToolRequest.read(**fields)
    assert caught.value.param == param


def test_a_held_answer_needs_a_known_form() -> None:
    with pytest.raises(ToolError, match="pass tool_form") as caught:
        ToolRequest.read([tool("f")], "required").grammar(None)
    assert caught.value.param == "tool_choice"
    with pytest.raises(ToolError, match="pass tool_form") as caught:
        ToolRequest.read([tool("f", strict=True)]).grammar(None)
    assert caught.value.param == "tools"
    with pytest.raises(ToolError, match="llama3_json, pythonic, hermes"):
        ToolRequest.read([tool("f")], "required").grammar("xml")  # pyright: ignore[reportArgumentType]
