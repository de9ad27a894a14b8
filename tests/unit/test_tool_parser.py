"""Calls in an answer: the published forms, what only looks like one, and what is told when."""

import json
from itertools import count
from typing import Any

import pytest

from llamarium.tokenizer.tools.definition import ToolDefinition
from llamarium.tokenizer.tools.deltas import CallArguments, CallBegin, CallEnd, ContentDelta, Delta
from llamarium.tokenizer.tools.parser import ToolCallParser

pytestmark = pytest.mark.quick

NAMES = ("f", "g", "get_weather", "trending_songs", "get_user_info", "brave_search")


def new_parser(*names: str, **options: Any) -> ToolCallParser:
    ids = (f"id{i}" for i in count())
    return ToolCallParser([ToolDefinition(name) for name in names or NAMES], new_id=lambda: next(ids), **options)


def read(text: str, *names: str, **options: Any) -> tuple[str, list[tuple[str, Any]]]:
    """Return the content and the calls: name and values, or the text of arguments that are not complete."""
    parser = new_parser(*names, **options)
    parser.push(text)
    parser.finish()
    calls = [(c.name, json.loads(c.arguments) if c.is_complete else c.arguments) for c in parser.calls]
    return parser.content, calls


PUBLISHED = {  # in Meta's and Hermes' prompt formats
    "<|python_tag|>{\n    \"type\": \"function\",\n    \"name\": \"trending_songs\",\n    \"parameters\": {\n        "
    "\"n\": \"10\",\n        \"genre\": \"all\"\n    }\n}": [("trending_songs", {"n": "10", "genre": "all"})],
    "[get_weather(city='San Francisco', metric='celsius'), get_weather(city='Seattle', metric='celsius')]": [
        ("get_weather", {"city": "San Francisco", "metric": "celsius"}),
        ("get_weather", {"city": "Seattle", "metric": "celsius"}),
    ],
    "[get_user_info(user_id=7890, special='black')]": [("get_user_info", {"user_id": 7890, "special": "black"})],
    '<|python_tag|>[get_weather(city="San Francisco", metric="celsius")]': [
        ("get_weather", {"city": "San Francisco", "metric": "celsius"})
    ],
    '<|python_tag|>brave_search.call(query="latest price of 1oz gold")': [
        ("brave_search", {"query": "latest price of 1oz gold"})
    ],
    '<tool_call>\n{"arguments": {"city": "Paris"}, "name": "get_weather"}\n</tool_call>': [
        ("get_weather", {"city": "Paris"})
    ],
}  # fmt: skip


@pytest.mark.parametrize("text", PUBLISHED)
def test_published_answers(text: str) -> None:
    assert read(text) == ("", PUBLISHED[text])


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "f", "parameters": {}}; {"name": "g", "arguments": {"a": 1}}', [("f", {}), ("g", {"a": 1})]),
        ('{"name": "f", "parameters": {}}\n{"name": "g"}\n', [("f", {}), ("g", {})]),
        ('{"name": "f"},{"name": "g"}', [("f", {}), ("g", {})]),
        ('<|python_tag|>{"name": "f"}<|python_tag|>{"name": "g"}', [("f", {}), ("g", {})]),
        (' \n{"id": "x", "name": "f", "type": "function"}', [("f", {})]),
        ('<tool_call>{"name": "f"}\n{"name": "g"}</tool_call>', [("f", {}), ("g", {})]),
        ('<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "g"}', [("f", {}), ("g", {})]),
        ('<tool_call>[f(a=1)]</tool_call>', [("f", {"a": 1})]),
        ("[f ( a = 1 , b=[1,2,], ) , g()]", [("f", {"a": 1, "b": [1, 2]}), ("g", {})]),
        ("[f(a=None, b=[True, False], c={'k': -1_0.5e3}, d='''x\n'y''')]",
         [("f", {"a": None, "b": [True, False], "c": {"k": -10500.0}, "d": "x\n'y"})]),
        (r"[f(a='it\'s \x41\u00e4\101\d', b=.5, c=+7., d=true)]",
         [("f", {"a": "it's AäA\\d", "b": 0.5, "c": 7.0, "d": True})]),
        ('{"name": "f", "parameters": {"a": "\\ud83d\\ude00 \\/ line\nbreak"}}', [("f", {"a": "😀 / line\nbreak"})]),
    ],
)  # fmt: skip
def test_calls(text: str, calls: list[tuple[str, Any]]) -> None:
    assert read(text) == ("", calls)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n",
        "Hello <world> & <tool_cal",
        '{"name": "unknown", "parameters": {}}',
        '{"name": "f", "parameters": null}',
        '{"name": "f", "parameters": "{}"}',
        '{"name": "f", "parameters": {"a": nul}}',
        '{"name": "f", "parameters": {a: 1}}',
        '{"name": "f", "note": "", "parameters": {"a": 1}}',
        '{"type": "object", "name": "f"}',
        '{"parameters": {"a": 1}}',
        '{"name": "f", "name": "g"}',
        '{"name": "f"',
        '{"name": "f", "parameters": {"a": tr',
        'I would write {"name": "f", "parameters": {}}',
        '```json\n{"name": "f", "parameters": {}}\n```',
        "I would write [f(a=1)]",
        "[f('x')]",
        "[f(x)]",
        "[f(a=x)]",
        "[f(a=(1, 2))]",
        "[f(a=b'x')]",
        "[f(**{})]",
        "[f(a=1e999)]",
        "[unknown(a=1)]",
        "[1, 2, 3]",
        "[f]",
        'brave_search.call(query="x")',
        "<|python_tag|>print(1)",
        "<|python_tag|>",
        '<tool_call>{"name": "unknown"}</tool_call>',
        "<tool_call>f(a=1)</tool_call>",
        "</tool_call>",
        '{"name": "f", "parameters": {"a": ' + "[" * 40 + "]" * 40 + "}}",
    ],
)
def test_what_only_looks_like_a_call_is_content(text: str) -> None:
    assert read(text) == (text, [])


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('Let me see.\n<tool_call>\n{"name": "f"}\n</tool_call>\n', "Let me see.\n", [("f", {})]),
        ('{"name": "f"}\n\nDone.', "\n\nDone.", [("f", {})]),
        ('{"name": "f"} ; then', " ; then", [("f", {})]),
        ('{"name": "f"};', ";", [("f", {})]),
        ('a <|python_tag|>{"name": "f"} b', "a  b", [("f", {})]),
        ("[f(a=1), g('x')]", ", g('x')]", [("f", {"a": 1})]),
        ("[f(a=1)", "", [("f", {"a": 1})]),
        ("[f(a=1, 'x')]", ", 'x')]", [("f", '{"a": 1')]),
        ('{"name": "f", "parameters": {"a": 1}, "b": 2}', ', "b": 2}', [("f", {"a": 1})]),
        ('{"name": "f", "parameters": {"a": 1, "a": 2}}', ', "a": 2}}', [("f", '{"a": 1')]),
        ('{"name": "f", "parameters": {"a": 1,}}', ",}}", [("f", '{"a": 1')]),
        ("[f(a=1, a=2)]", ", a=2)]", [("f", '{"a": 1')]),
        ('{"name": "f", "parameters": {"a": "broken o', "", [("f", '{"a": "broken o')]),
        ('{"name": "f", "parameters": {"a": 1, "b": tr', "", [("f", '{"a": 1')]),
        ('<tool_call>{"name": "x <tool_call>{"name": "f"}', '<tool_call>{"name": "x ', [("f", {})]),
        ('<tool_call>{"name": "f"} <tool_call>bad', " <tool_call>bad", [("f", {})]),
    ],
)
def test_content_beside_calls(text: str, content: str, calls: list[tuple[str, Any]]) -> None:
    assert read(text) == (content, calls)


def test_python_after_its_tag_calls_the_code_interpreter() -> None:
    code = 'import math\nprint("ä", [math.pi])\n'
    assert read(f"<|python_tag|>{code}", "code_interpreter") == ("", [("code_interpreter", {"code": code})])
    assert read("<|python_tag|>[f(1)]", "code_interpreter", "f") == ("", [("code_interpreter", {"code": "[f(1)]"})])
    assert read("<|python_tag|>[f(a=1)]", "code_interpreter", "f") == ("", [("f", {"a": 1})])
    assert read(code, "code_interpreter") == (code, [])


def test_one_call_is_the_first() -> None:
    calls = '<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "g"}</tool_call> and'
    for text in (calls, "[f(), g()]", '{"name": "f"}; {"name": "g"}'):
        assert read(text, most=1) == ("", [("f", {})])
    parser = new_parser(most=1)
    parser.push("Yes. <tool_call>")
    assert not parser.is_done
    parser.push('{"name": "f"}')
    assert (parser.is_done, parser.content) == (True, "Yes. ")


def test_calls_are_bounded_and_one_that_comes_again_ends_the_answer() -> None:
    def calls(*numbers: int) -> str:
        return "; ".join(f'{{"name": "f", "parameters": {{"a": {n}}}}}' for n in numbers)

    assert read(calls(*range(9)) + " and") == ("", [("f", {"a": n}) for n in range(8)])
    parser = new_parser()
    parser.push(calls(1, 2, 11, 2) + ";")
    assert parser.is_done and [json.loads(call.arguments)["a"] for call in parser.calls] == [1, 2, 11]
    parser.push(calls(3) + " and so on")
    parser.finish()
    assert (len(parser.calls), parser.content) == (3, "")
    assert read("<|python_tag|>[f(a=1), g(a=1), f(a=1), f(a=2)]") == ("", [("f", {"a": 1}), ("g", {"a": 1})])


def test_a_call_that_begins_as_one_before_is_told_once_it_differs() -> None:
    before, again = '{"name": "f", "parameters": {"a": "xy"}}', '; {"name": "f", "parameters": {"a": "x'
    parser = new_parser()
    assert told([before, again, 'z"}}', ""], parser)[1:3] == [
        [],
        [CallBegin(1, "id1", "f"), CallArguments(1, '{"a": "xz"}'), CallEnd(1)],
    ]
    cut = new_parser()
    assert told([before, again], cut)[2] == [
        CallBegin(1, "id1", "f"), CallArguments(1, '{"a": "x'), CallEnd(1, is_complete=False)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("openings", "call"),
    [
        (('{"name": "f", "parameters": ', '{"name": "g", "parameters": '), '{"name": "g", "parameters": {}}'),
        (("[f(", "[g("), "[g()]"),
        (("<tool_call>",), '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'),
    ],
)
def test_an_answer_of_another_form_has_calls_only_where_it_begins_with_one(openings: Any, call: str) -> None:
    assert read(call, openings=openings) == ("", [("g", {})])
    for answer in ('{"name": "g"}', '{"name":"g","parameters":{}}', '["<tool_call>[f()]", "<|python_tag|>[f()]"]', "3"):
        for pieces in ([answer], list(answer)):
            parser = new_parser(openings=openings)
            assert (
                "".join(d.text for some in told(pieces, parser) for d in some if isinstance(d, ContentDelta)) == answer
            )
            assert not parser.calls
    for length in range(1, len(call)):
        parser = new_parser(openings=openings)
        told(list(call[:length]), parser)
        assert parser.content == "", "what may begin a call is none of the answer"


def told(pieces: list[str], parser: ToolCallParser) -> list[list[Delta]]:
    return [*map(parser.push, pieces), parser.finish()]


def test_arguments_are_told_as_they_come() -> None:
    pieces = [
        '{"name": "get_',
        'weather", "param',
        'eters": {"city": ',
        '"San',
        " Francisco",
        '", "days"',
        ": 1",
        "2",
        "}}",
    ]
    assert told(pieces, new_parser()) == [
        [],
        [],
        [],
        [CallBegin(0, "id0", "get_weather"), CallArguments(0, '{"city": "San')],
        [CallArguments(0, " Francisco")],
        [CallArguments(0, '"')],
        [],
        [],
        [CallArguments(0, ', "days": 12}'), CallEnd(0)],
        [],
    ]
    pieces = ["[g(a='x", "y', b=", "True), f", "(c=1", ")", "]"]
    assert told(pieces, new_parser()) == [
        [CallBegin(0, "id0", "g"), CallArguments(0, '{"a": "x')],
        [CallArguments(0, 'y"')],
        [CallArguments(0, ', "b": true}'), CallEnd(0)],
        [],
        [CallBegin(1, "id1", "f"), CallArguments(1, '{"c": 1}'), CallEnd(1)],
        [],
        [],
    ]


def test_content_is_told_as_it_comes_but_for_what_may_be_a_tag() -> None:
    assert told(["Hello ", "<tool", " box", "> <tool_", 'call>{"name": "f"}', " end"], new_parser()) == [
        [ContentDelta("Hello ")],
        [],
        [ContentDelta("<tool box")],
        [ContentDelta("> ")],
        [CallBegin(0, "id0", "f"), CallArguments(0, "{}"), CallEnd(0)],
        [ContentDelta(" end")],
        [],
    ]


def test_a_call_that_breaks_off_says_so() -> None:
    assert told(['<tool_call>{"name": "f", "parameters": {"a": "x'], new_parser()) == [
        [CallBegin(0, "id0", "f"), CallArguments(0, '{"a": "x')],
        [CallEnd(0, is_complete=False)],
    ]
    assert told(['[f(a="x", y)] done'], new_parser()) == [
        [CallBegin(0, "id0", "f"), CallArguments(0, '{"a": "x"'), CallEnd(0, False), ContentDelta(", y)] done")],
        [],
    ]
